"""The folder of one trial: its checkpoints while it lasts, of the best trial the weights afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

from evener.records.atomic import remove_drafts
from evener.records.record import Epoch

_WEIGHTS, _CHECKPOINTS, _STEPS = "model.safetensors", "checkpoints", "steps-per-epoch"


class TrialFolder:
    """What a trial has on the disk.

    Args:
        folder: of the trial; made if it is not there.

    Attributes:
        checkpoints: their folder.
        team: file of the plan by which several nodes share the trial.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints, self.team = folder, folder / _CHECKPOINTS, folder / "team.json"

    @property
    def has_checkpoint(self) -> bool:
        """Whether its run can go on from one."""
        return any(self.checkpoints.glob("[!.]*"))

    def reported(self, epoch: Epoch) -> None:
        """An epoch is written down in the journal."""
        if not self._steps.exists():
            self._steps.write_text(str(epoch.step // (epoch.epoch + 1)))

    def forget_unreported(self, epochs: int) -> None:
        """Remove checkpoints of ends of epochs after the `epochs` that are written down: their scores are not known.

        A process that is killed between its checkpoint and its report leaves such; it computes that epoch again.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.checkpoints):
            remove_drafts(folder)
        limit = (epochs + 1) * int(self._steps.read_text()) if self._steps.exists() else 1
        for found in self.checkpoints.glob("[!.]*"):
            if _step_of(found) >= limit:
                shutil.rmtree(found) if found.is_dir() else found.unlink()

    def conclude(self, *, keep_weights: bool) -> None:
        """Remove what nobody will want any more."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        remove_drafts(self.folder)
        if not keep_weights:
            (self.folder / _WEIGHTS).unlink(missing_ok=True)

    @property
    def _steps(self) -> Path:
        return self.folder / _STEPS


def _step_of(checkpoint: Path) -> int:
    """After which it was written, by its name: `step-00000012`, or `step-12.safetensors`."""
    digits = checkpoint.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
