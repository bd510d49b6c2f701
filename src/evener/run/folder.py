"""The folder of a run: made before the run begins, so that a long one does not end in front of a locked door."""

from __future__ import annotations

import time
from pathlib import Path

from evener.errors import InvalidInput


def run_folder(name: str) -> Path:
    """The folder `name`, which is there afterwards.

    Raises:
        InvalidInput: it cannot be made.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write into {folder}: {error.strerror}") from error
    return folder


def folder_name(task: str, output: str | None) -> str:
    """The folder of a run: what the user named, or `runs/TASK-TIME`."""
    return output or str(Path("runs") / f"{Path(task).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
