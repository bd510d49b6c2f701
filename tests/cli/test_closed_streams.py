"""A command whose streams were closed before it began works, and ends as it does with open ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = "import sys; sys.argv[0] = 'evener'; from evener.cli.app import main; main()"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-", "2>&-"])
@pytest.mark.parametrize(("words", "code"), [(("version",), 0), (("plan", "nonsense"), 2)])
def test_command_works_with_closed_streams(tmp_path: Path, closed: str, words: tuple[str, ...], code: int) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", START, *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    if "2>&-" not in closed:
        assert ended.stderr.count("evener: ") == bool(code)


STARTER = """
import subprocess, sys
from evener.cli.app import _open_streams
_open_streams()
opened = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
sys.exit(subprocess.run([sys.executable, "-c", opened], close_fds=False).returncode)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-", "2>&-"])
def test_started_processes_have_streams(closed: str) -> None:
    words = ["bash", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", STARTER]
    assert (
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=False).returncode == 0
    )
