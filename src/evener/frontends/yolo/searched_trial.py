"""A trial of a search, as its ranks see it: the end of every epoch is reported, and the search says whether to go on.

    <folder of the trial>/checkpoints/trainer.state   all that decides the batches that come
    <folder of the trial>/checkpoints/results.csv     the lines of Ultralytics as they were then
    <folder of the trial>/metrics.json                of the epoch with the best weights

The score of an epoch is the best fitness so far: that of best.pt. The state is written after an epoch, if that takes
little of the time, and where the trial stops to go on elsewhere. A trial that goes on from its state, also on other
nodes, comes to the weights of one that was never interrupted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evener.frontends.yolo.generations import encode_state, take_state
from evener.frontends.yolo.overrides import YoloConfig
from evener.records.atomic import atomic_write
from evener.records.errors import Interrupted
from evener.records.history import History
from evener.records.record import Epoch, finite_validation

FITNESS = "fitness"
METRICS_FILE = "metrics.json"
STATE_FILE = "trainer.state"
_RESULTS = "results.csv"
_LEAST_WORK = 20
"""Times the seconds that the state takes to be written, that have to be worked before the next."""


class TrialConfig(NamedTuple):
    """The configuration of a trial's run.

    Attributes:
        training: options of the training.
        state: file of its state.
        samples: of a batch, by node, if several nodes share the trial; a node that is not named has none.
    """

    training: YoloConfig
    state: Path
    samples: Mapping[str, int]

    @property
    def patience(self) -> float:
        """Seconds of silence after which a node counts as lost."""
        return self.training.patience

    def among(self, nodes: Sequence[str]) -> TrialConfig:
        """Return this configuration for the ranks of these nodes."""
        if not self.samples:
            return self
        shares = ",".join(str(self.samples.get(name, 0)) for name in nodes)
        return self._replace(training=msgspec.structs.replace(self.training, shares=shares))


class SearchedTrial:
    """A trial of a search; every rank has one.

    Args:
        state: file of the state from which the trial goes on; it need not exist yet.
    """

    def __init__(self, state: Path) -> None:
        self._state, self._restored = state, 0
        self._kept_at, self._took = 0.0, 0.0

    def restore(self, trainer: Any) -> None:
        """Let `trainer`, which is set up, go on from the state of the trial, if there is one."""
        if not self._state.exists():
            return
        rank = trainer.trainer_rank
        head = take_state(trainer, self._state.read_bytes(), rank.group.device, is_new=True)
        self._restored = head.batch
        trainer.start_epoch, trainer.scheduler.last_epoch = head.first_epoch, head.first_epoch - 1
        rank.work.session.start(head.batch + 1)
        results = self._state.with_name(_RESULTS)
        if rank.leads and results.exists():
            atomic_write(trainer.csv, results.read_bytes())  # Ultralytics has removed it
        last = rank.folder / "weights" / trainer.last.name
        if last.exists() and last != trainer.last:  # to which a loss that is no number takes all ranks back
            trainer.last.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(last, trainer.last)

    def stop(self, trainer: Any, batch: int) -> bool:
        """Keep the state after `batch`, from 1, within an epoch; all ranks call this.

        Return whether the ranks may stop: not while they have gradients that were not added up yet.
        """
        rank = trainer.trainer_rank
        if batch <= self._restored:  # the loop has not come to where the trial goes on: the state is there
            return True
        if not trainer.model.gradients.is_complete:
            return False
        if rank.leads:
            self._keep(trainer, batch, next_epoch=trainer.epoch)
        rank.group.barrier()  # the end of one rank ends the others, and the leader would be writing
        return True

    def end_epoch(self, trainer: Any) -> None:
        """Report the score of an epoch, and keep the state after it if that is due; all ranks call this.

        Where Ultralytics stops early, the epochs that are left count as computed, with the best fitness.

        Raises:
            Interrupted: the search ends the trial, or moves it to other nodes.
        """
        rank, next_epoch = trainer.trainer_rank, trainer.epoch + 1
        is_last = bool(trainer.stop) or next_epoch >= trainer.epochs
        said = b""
        if rank.leads and not is_last:
            is_over = self._report(trainer, trainer.epoch)
            said = b"over" if is_over else b""
            if is_over or time.monotonic() - self._kept_at >= _LEAST_WORK * self._took:
                self._keep(trainer, next_epoch * len(trainer.train_loader), next_epoch=next_epoch)
        elif rank.leads:
            for epoch in range(trainer.epoch, trainer.epochs):
                if self._report(trainer, epoch):
                    break
        if rank.group.broadcast(said):
            raise Interrupted(f"the search ended this trial after epoch {trainer.epoch + 1}")

    def _keep(self, trainer: Any, batch: int, *, next_epoch: int) -> None:
        """Write the state after `batch`, with which the loop goes on in `next_epoch`, and the lines of results."""
        begin = time.monotonic()
        if trainer.csv.exists():
            atomic_write(self._state.with_name(_RESULTS), trainer.csv.read_bytes())
        atomic_write(self._state, encode_state(trainer, batch, next_epoch, History()))
        self._kept_at = time.monotonic()
        self._took = self._kept_at - begin

    def _report(self, trainer: Any, epoch: int) -> bool:
        """Report the end of `epoch`, and write metrics that are the best; return whether the trial is over."""
        session, step = trainer.trainer_rank.work.session, (epoch + 1) * len(trainer.train_loader)
        fitness, best = float(trainer.fitness or 0.0), float(trainer.best_fitness or 0.0)
        if fitness >= best:
            metrics = {name: float(value) for name, value in (trainer.metrics or {}).items()}
            atomic_write(self._state.parents[1] / METRICS_FILE, msgspec.json.encode({**metrics, FITNESS: fitness}))
        validation = finite_validation(
            trainer.trainer_rank.env.node.name,
            step=step,
            epoch=epoch,
            loss=0.0,
            accuracy=None,
            seconds=0.0,
            metrics={FITNESS: best},
        )
        end = Epoch(step=step, epoch=epoch, loss=session.history.last_loss(), validation=validation)
        return bool(trainer.trainer_rank.env.is_over(end))
