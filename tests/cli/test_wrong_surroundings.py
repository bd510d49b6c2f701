"""Wrong surroundings, drawn by a script: a command does without, or ends by one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.wrong_inputs import WrongInput, write
from support.wrong_surroundings import CHECKPOINTED, WHOLE, wrong_surroundings

COUNT, QUICK, SEED = 120, 6, 52
ALL = wrong_surroundings(COUNT, SEED)
START = "import sys; sys.argv[0] = 'evener'; from evener.cli.app import main; main()"


def evener(one: WrongInput, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EVENER")}
    return subprocess.run(
        [*one.prefix, sys.executable, "-c", START, *one.words],
        cwd=folder,
        env={**variables, "EVENER_HOME": str(folder / "home"), "COLUMNS": "160", **one.variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",  # as with PYTHONIOENCODING=utf-16
        timeout=100,
        check=False,
    )


def damage(one: WrongInput, folder: Path) -> None:
    """Leave the checkpoints of a run, damaged as `one` says."""
    words = ("train", "own.py", "--epochs", "1", "--checkpoint", CHECKPOINTED, "--output", "before")
    first = folder / "own.py"
    wanted = first.read_text()
    first.write_text(WHOLE)
    assert evener(WrongInput(words), folder).returncode == 0
    first.write_text(wanted)
    kept: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda content: content[: len(content) // 2],
        "empty": lambda _: b"",
        "text": lambda _: b"rubbish",
    }
    for file in (folder / CHECKPOINTED).rglob("*"):
        if file.is_file() and one.damage in kept:
            file.write_bytes(kept[one.damage](file.read_bytes()))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=f"{number}", marks=[pytest.mark.slow] if number >= QUICK or one.damage else [])
        for number, one in enumerate(ALL)
    ],
)
def test_unusual_environment_gives_at_most_one_sentence(tmp_path: Path, one: WrongInput) -> None:
    if one.prefix[:1] == ("setpriv",) and os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    tmp_path.chmod(0o777)
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o055)
    write(one, tmp_path)
    if one.damage:
        damage(one, tmp_path)
    ended = evener(one, tmp_path)
    for name in one.modes:
        (tmp_path / name).chmod(0o700)
    assert "Traceback" not in ended.stdout + ended.stderr, one.name
    if one.may_work and ended.returncode == 0:
        return
    assert ended.returncode in (1, 2, 3, 4), (one.name, ended.returncode, ended.stderr)
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("evener: ")]
    assert len([line for line in sentences if not line.startswith("evener: warning: ")]) == 1, (one.name, ended.stderr)


@pytest.mark.parametrize("limit", ["cd gone && rmdir ../gone", "ulimit -n 16", "ulimit -v 300000"])
def test_system_limit_gives_one_sentence(tmp_path: Path, limit: str) -> None:
    words = ("train", "own.py", "--agreement", "average", "--local-nodes", "1,1", "--epochs", "1")
    shell = ("bash", "-c", f'{limit}; exec "$0" "$@"')
    one = WrongInput(words, {"own.py": WHOLE}, prefix=shell, folders=("gone",))
    write(one, tmp_path)
    ended = evener(one, tmp_path)
    assert ended.returncode in (1, 2, 3, 4)
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith("evener: ")]) == 1
