"""The checkpoints in a folder, and their refusal where there are none, before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

from evener.records.errors import MissingFile


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def require_checkpoint(folder: Path) -> None:
    """Raise MissingFile unless `folder` holds a checkpoint to resume from; name a folder near it that does."""
    if checkpoints_in(folder):
        return
    state = "holds no checkpoint (no folder step-N)" if folder.is_dir() else "does not exist"
    if (other := _checkpoints_near(folder)) is not None:
        cure = f"{other} holds checkpoints: type --resume --checkpoint {other}"
    else:
        cure = "name the folder that holds them with --checkpoint FOLDER, or start without --resume"
    raise MissingFile(f"--resume finds no checkpoint, since {folder} {state}; {cure}")


def _checkpoints_near(folder: Path) -> Path | None:
    """Return a folder with checkpoints: in or around `folder`, or of the newest run beside its run; None if none."""
    runs = folder.parent.parent.glob("*/checkpoints")
    beside = sorted((run for run in runs if checkpoints_in(run)), key=lambda run: run.stat().st_mtime, reverse=True)
    near = (folder / "checkpoints", folder.parent, folder.parent / "checkpoints", *beside)
    return next((one for one in near if checkpoints_in(one)), None)
