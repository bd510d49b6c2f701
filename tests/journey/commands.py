"""Runs the real command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TINY = str(Path(__file__).parents[1] / "support_tasks" / "tiny.py")


def evener(*words: str, cwd: Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
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
