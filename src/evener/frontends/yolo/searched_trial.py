"""A trial of a search, as its ranks see it: the end of every epoch is reported, and the search says whether to go on.

    <folder of the trial>/checkpoints/trainer.state   after every epoch: all that decides the epochs that come
    <folder of the trial>/checkpoints/results.csv     the lines of Ultralytics as they were then
    <folder of the trial>/metrics.json                of the epoch with the best weights

The score of an epoch is the best fitness so far: that of best.pt. A trial that goes on from its state, also on other
nodes, comes to the weights of one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evener.frontends.yolo.generations import encode_state, restore_state
from evener.frontends.yolo.overrides import YoloConfig
from evener.records.atomic import atomic_write
from evener.records.errors import Interrupted
from evener.records.history import History
from evener.records.record import Epoch, finite_validation

FITNESS = "fitness"
METRICS_FILE = "metrics.json"
STATE_FILE = "trainer.state"
_RESULTS = "results.csv"


class TrialConfig(NamedTuple):
    """The configuration of a trial's run.

    Attributes:
        training: options of the training.
        state: file of its state.
        samples: of a batch, by node, if several nodes share the trial; a node that is not named has none.
        patience: seconds of silence after which a node counts as lost.
    """

    training: YoloConfig
    state: Path
    samples: Mapping[str, int]
    patience: float

    def among(self, nodes: Sequence[str]) -> TrialConfig:
        """Return this configuration for the ranks of these nodes."""
        if not self.samples:
            return self
        shares = ",".join(str(self.samples.get(name, 0)) for name in nodes)
        return self._replace(training=msgspec.structs.replace(self.training, shares=shares))


class SearchedTrial:
    """A trial of a search; every rank has one.

    Args:
        state: file of the state after the last epoch; it need not exist yet.
    """

    def __init__(self, state: Path) -> None:
        self._state = state

    def restore(self, trainer: Any) -> None:
        """Let `trainer`, which is set up, go on after the last epoch of the trial, if there was one."""
        if not self._state.exists():
            return
        head = restore_state(trainer, self._state.read_bytes())
        model, session = trainer.model, trainer.trainer_rank.work.session
        model.gradients.forget()
        model.done = head.batch
        trainer.start_epoch, trainer.scheduler.last_epoch = head.epoch + 1, head.epoch
        session.start(head.batch + 1)
        results = self._state.with_name(_RESULTS)
        if trainer.trainer_rank.leads and results.exists():
            atomic_write(trainer.csv, results.read_bytes())  # Ultralytics has removed it

    def end_epoch(self, trainer: Any) -> None:
        """Keep the state after an epoch and report its score; all ranks call this.

        An epoch after which Ultralytics stops early counts as the last one.

        Raises:
            Interrupted: the search ends the trial, or moves it to other nodes.
        """
        rank = trainer.trainer_rank
        is_last = bool(trainer.stop) or trainer.epoch + 1 >= trainer.epochs
        said = b""
        if rank.leads:
            said = b"over" if self._report(trainer, is_last=is_last) else b""
        if rank.group.broadcast(said) and not is_last:
            raise Interrupted(f"the search ended this trial after epoch {trainer.epoch + 1}")

    def _report(self, trainer: Any, *, is_last: bool) -> bool:
        """Write state and metrics, and report the epoch; return whether the trial is over."""
        session, steps = trainer.trainer_rank.work.session, len(trainer.train_loader)
        atomic_write(self._state, encode_state(trainer, (trainer.epoch + 1) * steps, 0, History()))
        if trainer.csv.exists():
            atomic_write(self._state.with_name(_RESULTS), trainer.csv.read_bytes())
        best = float(trainer.best_fitness or 0.0)
        if float(trainer.fitness or 0.0) >= best:
            metrics = {name: float(value) for name, value in (trainer.metrics or {}).items()}
            file = self._state.parents[1] / METRICS_FILE
            atomic_write(file, msgspec.json.encode({**metrics, FITNESS: float(trainer.fitness or 0.0)}))
        epoch = trainer.epochs - 1 if is_last else trainer.epoch
        step = (epoch + 1) * steps
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
