"""Checkpoints of a training on the nodes of a master, which fetches and keeps them: to go on from when all are gone.

    checkpoints/step-00000120/model.safetensors   weights of best.pt and last.pt, lines of results.csv (`results_io`)
    checkpoints/step-00000120/trainer.state       what decides the batches that come (`generations`)
    checkpoints/step-00000120/SHA256SUMS          of both, as `sha256sum --check` reads it

The leader writes one at the end of every epoch, and by the clock in long ones. Ranks that begin again all read it.
"""

from __future__ import annotations

import shutil
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from evener.frontends.yolo.results_io import encode_metrics, restore_results, write_results
from evener.ps.node.checkpoint_sender import CHECKPOINTS
from evener.records.atomic import atomic_draft
from evener.records.errors import InvalidFile, first_line
from evener.records.record import WEIGHTS, Event
from evener.training.checkpoint import is_sound, write_sums

_STATE = "trainer.state"
_FILES = (WEIGHTS, _STATE)
_KEPT = 2
_SECONDS = 10.0
"""Between two of them, at least."""
_LONGEST = 600.0
"""Seconds after which one is due in the midst of an epoch."""
_LEAST_WORK = 50
"""Times the seconds that one takes, that have to be worked before the next."""


class RemoteCheckpoints:
    """The checkpoints of one rank at its master.

    Args:
        folder: where the rank may write.
        resumes: whether it goes on from a checkpoint in that folder.

    Attributes:
        resumes: see above.
    """

    def __init__(self, folder: Path, *, resumes: bool) -> None:
        self._folder, self.resumes = folder, resumes
        self._written_at, self._took = time.monotonic(), 0.0

    def leave(self, trainer: Any) -> None:
        """Write the results of the training for the user who submitted it."""
        write_results(trainer, self._folder / WEIGHTS, metrics=encode_metrics(trainer))

    def is_due(self, *, ends_epoch: bool) -> bool:
        """Whether the leader is to write one now."""
        worked = time.monotonic() - self._written_at
        return worked >= max(_SECONDS if ends_epoch else _LONGEST, _LEAST_WORK * self._took)

    def write(self, trainer: Any, state: bytes, batch: int) -> Event:
        """Write a checkpoint of the `state` after `batch`; return its event. A full disk does not end the run."""
        begin, target = time.monotonic(), self._path(batch)
        try:
            with atomic_draft(target) as draft:
                draft.mkdir()
                write_results(trainer, draft / WEIGHTS)
                (draft / _STATE).write_bytes(state)
                write_sums(draft, _FILES)
            for old in sorted(target.parent.glob("step-*"))[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            event = Event(step=batch, kind="checkpoint", message="its node offers it to the master")
        except OSError as error:
            message = f"cannot write the checkpoint of step {batch} in {target.parent}: {first_line(error)}"
            event = Event(step=batch, kind="no checkpoint", message=message)
        self._written_at = time.monotonic()
        self._took = self._written_at - begin
        return event

    def has(self, batch: int) -> bool:
        """Whether there is one after `batch`, which this rank has written or begun from."""
        return self._path(batch).exists()

    def _path(self, batch: int) -> Path:
        return self._folder / CHECKPOINTS / f"step-{batch:08d}"

    def state(self) -> bytes:
        """Read the state that this rank goes on from."""
        return (self._newest() / _STATE).read_bytes()

    def restore_results(self, trainer: Any) -> None:
        """Let `trainer`, which is set up, have best.pt and results.csv as they were; last.pt is of an epoch's end."""
        model, file = deepcopy(trainer.ema.ema), self._newest() / WEIGHTS
        restore_results(model, vars(trainer.args), file, trainer.save_dir, names=("best",))

    def _newest(self) -> Path:
        """Return the newest checkpoint. Raises InvalidFile: it is damaged."""
        newest = max((self._folder / CHECKPOINTS).glob("step-*"))
        if not is_sound(newest, _FILES):
            raise InvalidFile(f"checkpoint {newest} is damaged: submit the training again")
        return newest
