"""The folder of one trial: its checkpoints while it runs, and afterwards the weights of the best trial."""

from __future__ import annotations

import shutil
from pathlib import Path

from evener.records.atomic import remove_drafts
from evener.records.record import WEIGHTS, Epoch

_CHECKPOINTS, _STEPS = "checkpoints", "steps-per-epoch"


class TrialFolder:
    """The files of a trial.

    Args:
        folder: folder of the trial; created if it does not exist.

    Attributes:
        checkpoints: folder of the checkpoints.
        team: file of the plan by which several nodes share the trial.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints, self.team = folder, folder / _CHECKPOINTS, folder / "team.json"

    @property
    def has_checkpoint(self) -> bool:
        """Whether its run can continue from a checkpoint."""
        return any(self.checkpoints.glob("[!.]*"))

    def record_epoch(self, epoch: Epoch) -> None:
        """Record the steps per epoch, before the first epoch is in the journal."""
        if not self._steps.exists():
            self._steps.write_text(str(epoch.step // (epoch.epoch + 1)))

    def forget_unreported(self, epochs: int) -> None:
        """Remove checkpoints of ends of epochs after the `epochs` in the journal, because their scores are unknown.

        A process that is killed between its checkpoint and its report leaves such a checkpoint; it computes that epoch
        again.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.checkpoints):
            remove_drafts(folder)
        limit = (epochs + 1) * int(self._steps.read_text()) if self._steps.exists() else 1
        for checkpoint in self.checkpoints.glob("[!.]*"):
            if _step_of(checkpoint) >= limit:
                shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()

    def conclude(self, *, keep_weights: bool) -> None:
        """Remove the files that are no longer needed."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        remove_drafts(self.folder)
        if not keep_weights:
            (self.folder / WEIGHTS).unlink(missing_ok=True)

    @property
    def _steps(self) -> Path:
        return self.folder / _STEPS


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint from its name: `step-00000012`, or `step-12.safetensors`."""
    digits = checkpoint.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
