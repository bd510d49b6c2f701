"""Runs the real command: in a process of its own, or, where many words are tried, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from evener.cli.app import main

TINY = str(Path(__file__).parents[1] / "support_tasks" / "tiny.py")


def evener(*words: str, cwd: Path, timeout: float = 110, **environment: str) -> subprocess.CompletedProcess[str]:
    """`evener WORDS` run to its end."""
    return subprocess.run(
        command(*words),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


def evener_here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same without the seconds that a new process takes to import everything."""
    argv, stdout, stderr = ["evener", *words], io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, COLUMNS="160"),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(argv, code, stdout.getvalue(), stderr.getvalue())


def command(*words: str) -> list[str]:
    """The words that start `evener WORDS`."""
    return [sys.executable, "-m", "evener", *words]


def last_json(result: subprocess.CompletedProcess[str]) -> Any:
    """The object in the last line of stdout."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def processes_of(marker: str) -> list[int]:
    """Ids of running processes whose environment holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
