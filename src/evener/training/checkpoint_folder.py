"""The checkpoints in a folder, and their refusal where there are none, before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

from evener.records.errors import MissingFile


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def require_checkpoint(folder: Path) -> None:
    """Raise MissingFile unless `folder` holds a checkpoint to resume from."""
    if not checkpoints_in(folder):
        raise MissingFile(f"no checkpoint to resume from in {folder}; start without --resume")
