"""The checkpoints in a folder, and their refusal where there are none, before PyTorch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evener.records.errors import InvalidInput, MissingFile


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


def refuse_checkpoints(folder: Path) -> None:
    """Raise InvalidInput if `folder` holds checkpoints, which a new run would mix with its own."""
    if checkpoints_in(folder):
        raise InvalidInput(
            f"{folder} holds checkpoints of an earlier run; "
            "add --resume to go on with it, or name another folder with --checkpoint"
        )


def end_of_run(step: int, epochs: int, steps_per_epoch: int) -> str:
    """Return the end of a message if the run of a checkpoint after `step` is complete, else an empty text.

    Raises:
        InvalidInput: the checkpoint is of a longer run.
    """
    total = epochs * steps_per_epoch
    if step > total:
        raise InvalidInput(
            f"cannot resume: the checkpoint is of step {step}, and --epochs {epochs} ends after step {total}; "
            "give at least as many epochs as the earlier run had, or name another folder with --checkpoint"
        )
    return f"; all epochs are done: --epochs, now {epochs}, says how many there are to be" if step == total else ""


def refuse_other_settings(saved: Mapping[str, object], now: Mapping[str, object], folder: Path) -> None:
    """Raise InvalidInput if the checkpoint was made with settings that would change the order of samples."""
    for name, after in now.items():
        if (before := saved[name]) != after:
            raise InvalidInput(
                f"cannot resume from {folder}: it was made with {name} {before!r}, this run has {after!r}; "
                "use the same, or name the checkpoints of this run with --checkpoint FOLDER"
            )


def _checkpoints_near(folder: Path) -> Path | None:
    """Return a folder with checkpoints: in or around `folder`, or of the newest run beside its run; None if none."""
    runs = folder.parent.parent.glob("*/checkpoints")
    beside = sorted((run for run in runs if checkpoints_in(run)), key=lambda run: run.stat().st_mtime, reverse=True)
    near = (folder / "checkpoints", folder.parent, folder.parent / "checkpoints", *beside)
    return next((one for one in near if checkpoints_in(one)), None)
