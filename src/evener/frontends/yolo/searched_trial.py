"""A trial of a search, as its ranks see it: the end of every epoch is reported, and the search says whether to go on.

    <folder of the trial>/checkpoints/trainer.state   all that decides the batches that come
    <folder of the trial>/checkpoints/results.csv     the lines of Ultralytics as they were then

On the nodes of a master, the state is in the checkpoints that the master keeps (`remote_checkpoints`).

The score of an epoch is the best fitness so far: that of best.pt. The state is written after an epoch, if that takes
little of the time, and where the trial stops to go on elsewhere. A trial that goes on from its state, also on other
nodes, comes to the weights of one that was never interrupted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from evener.frontends.yolo.generations import encode_state, take_state
from evener.frontends.yolo.overrides import YoloConfig
from evener.records.atomic import atomic_write
from evener.records.errors import Interrupted
from evener.records.history import History
from evener.records.record import Epoch, finite_validation

FITNESS = "fitness"
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


class SearchedTrial(Protocol):
    """A trial of a search; every rank has one."""

    def restore(self, trainer: Any) -> None:
        """Let `trainer`, which is set up, go on from the state of the trial, if there is one."""

    def stop(self, trainer: Any, batch: int) -> bool:
        """Keep the state after `batch`, from 1, within an epoch; all ranks call this.

        Return whether the ranks may stop: not while they have gradients that were not added up yet.
        """

    def end_epoch(self, trainer: Any) -> None:
        """Report the score of an epoch; all ranks call this.

        Raises:
            Interrupted: the search ends the trial, or moves it to other nodes.
        """

    def leave(self, trainer: Any) -> None:
        """Report what was not reported yet; the leader calls this when all is trained."""


class LocalTrial:
    """A trial on nodes of this machine.

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
        """Keep the state; see `SearchedTrial`."""
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
        """Report the score of an epoch, and keep the state after it if that is due; see `SearchedTrial`."""
        rank, next_epoch = trainer.trainer_rank, trainer.epoch + 1
        said = b""
        if rank.leads:
            is_over = any(rank.env.is_over(end) for end in epoch_ends(trainer))
            is_last = _is_last_epoch(trainer)
            said = b"over" if is_over and not is_last else b""
            if not is_last and (is_over or time.monotonic() - self._kept_at >= _LEAST_WORK * self._took):
                self._keep(trainer, next_epoch * len(trainer.train_loader), next_epoch=next_epoch)
        if rank.group.broadcast(said):
            raise Interrupted(f"the search ended this trial after epoch {trainer.epoch + 1}")

    def leave(self, trainer: Any) -> None:
        """Do nothing: every epoch has been reported."""

    def _keep(self, trainer: Any, batch: int, *, next_epoch: int) -> None:
        """Write the state after `batch`, with which the loop goes on in `next_epoch`, and the lines of results."""
        begin = time.monotonic()
        if trainer.csv.exists():
            atomic_write(self._state.with_name(_RESULTS), trainer.csv.read_bytes())
        atomic_write(self._state, encode_state(trainer, batch, next_epoch, History()))
        self._kept_at = time.monotonic()
        self._took = self._kept_at - begin


class RemoteTrial:
    """A trial on nodes of a master, which keeps its state; the search assigns other nodes to it, or none, to end it."""

    def __init__(self) -> None:
        self._ends: list[Epoch] = []
        self._num_reported = 0

    def restore(self, trainer: Any) -> None:
        """Do nothing: the ranks begin with the checkpoint of the master."""

    def stop(self, trainer: Any, batch: int) -> bool:
        """Keep the state; see `SearchedTrial`."""
        return bool(trainer.trainer_rank.keep_last(batch))

    def end_epoch(self, trainer: Any) -> None:
        """Report the score of an epoch; a rank that has become the leader reports also the earlier ones again."""
        self._ends += epoch_ends(trainer)
        self.leave(trainer)

    def leave(self, trainer: Any) -> None:
        """Report what was not reported yet, if this rank leads."""
        if trainer.trainer_rank.leads:
            for end in self._ends[self._num_reported :]:
                trainer.trainer_rank.env.notify(end)
            self._num_reported = len(self._ends)


def epoch_ends(trainer: Any) -> Iterator[Epoch]:
    """Yield the end of the epoch that `trainer` has validated, with its best fitness so far.

    The metrics of the epoch are with it if they are the best. Where Ultralytics stops early, the epochs that are left
    count as computed.
    """
    session = trainer.trainer_rank.work.session
    fitness, best = float(trainer.fitness or 0.0), float(trainer.best_fitness or 0.0)
    metrics = {name: float(value) for name, value in (trainer.metrics or {}).items()} if fitness >= best else {}
    for epoch in range(trainer.epoch, trainer.epochs if _is_last_epoch(trainer) else trainer.epoch + 1):
        step = (epoch + 1) * len(trainer.train_loader)
        validation = finite_validation(
            trainer.trainer_rank.env.node.name,
            step=step,
            epoch=epoch,
            loss=0.0,
            accuracy=None,
            seconds=0.0,
            metrics={**metrics, FITNESS: best},
        )
        yield Epoch(step=step, epoch=epoch, loss=session.history.last_loss(), validation=validation)


def _is_last_epoch(trainer: Any) -> bool:
    return bool(trainer.stop) or trainer.epoch + 1 >= trainer.epochs
