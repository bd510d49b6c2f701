"""Trials of thin tasks: one process per trial, which trains from the first step to the weights and never loads PyTorch.

    for epoch: for step: forward, backward, step         paced, as local nodes are
               validate; checkpoint; end here if a callback says so

Samples, their order, seeds and learning rates are those of the nodes of a master that agree at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from evener.config.run_config import RunConfig, require_samples
from evener.data.sampler import permutation
from evener.data.tasks.load import load_thin_task
from evener.launch.nodes import NodeSpec
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.ps.node.engine import LoneSamples
from evener.ps.node.thin_backend import ThinBackend
from evener.ps.protocol.run_result import weights_of
from evener.records.atomic import atomic_write
from evener.records.errors import EvenerError, Interrupted, InvalidFile, NonFiniteLoss, first_line
from evener.records.events import RunEvent, encode_events
from evener.records.record import WEIGHTS, Epoch, Event, Validation, finite_validation
from evener.search.local_runner import failure_of
from evener.system.pace import Pace
from evener.training.checkpoint_folder import (
    checkpoints_in,
    end_of_run,
    refuse_checkpoints,
    refuse_other_settings,
    require_checkpoint,
)

_STEP = "step"
_MAX_CHECKPOINTS = 2
"""The same as for runs of PyTorch."""


@dataclass(frozen=True)
class ThinContext:
    """The node of a thin training, and its callbacks.

    Attributes:
        node: that computes.
        notify: shows an event to the user.
        is_over: receives the end of an epoch; returns whether the run ends there.
        is_stopping: whether the process was asked to stop.
    """

    node: NodeSpec
    notify: Callable[[RunEvent], object]
    is_over: Callable[[Epoch], bool]
    is_stopping: Callable[[], bool]


def train_thin(context: ThinContext, config: RunConfig) -> None:
    """Train the thin task that `config` names; the weights are then in its folder.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite; the checkpoint stays as it was.
        Interrupted: the process was asked to stop; a checkpoint is written.
        EvenerError: task, data or checkpoint are not what they should be.
    """
    task = load_thin_task(config.task, config.data, config.option)
    training = _ThinTraining(context, config, ThinBackend(task, config.seed, config.precision), *config.sizes_of(task))
    training.run()


class _ThinTraining:
    def __init__(
        self, context: ThinContext, config: RunConfig, backend: ThinBackend, batch_size: int, epochs: int
    ) -> None:
        require_samples(batch_size, backend.num_samples)
        self._context, self._config, self._backend = context, config, backend
        sizes = {"batch_size": batch_size, "samples": backend.num_samples}
        settings = {"task": Path(config.task).stem, "seed": config.seed, **sizes, "precision": config.precision}
        self._settings = {name: str(value) for name, value in settings.items()}
        self._lone = LoneSamples(backend)
        self._batch, self._epochs = batch_size, epochs
        self._steps_per_epoch = -(-backend.num_samples // batch_size)
        self._pace = Pace(context.node.speed_at(0))
        backend.prepare(epochs * self._steps_per_epoch)
        if not config.resume:
            refuse_checkpoints(config.checkpoint_folder)
        self._done = self._restored() if config.resume else 0

    def run(self) -> None:
        """Train all epochs, from the first or the checkpoint, until the last or until a callback ends the run."""
        for epoch in range(self._done // self._steps_per_epoch, self._epochs):
            loss = self._train(epoch)
            validation = self._validate(epoch) if self._backend.num_validation else None
            self._save()
            if self._context.is_over(Epoch(step=self._done, epoch=epoch, loss=loss, validation=validation)):
                break
        state = self._backend.initial_weights()
        atomic_write(self._config.folder / WEIGHTS, weights_of(state))

    def _train(self, epoch: int) -> float:
        """Train the rest of an epoch; return the mean loss over its samples."""
        self._backend.set_training(True)
        total, count = 0.0, 0
        for indices in self._batches(epoch):
            enough = self._lone.enough(indices)
            with self._pace.computing():
                loss = self._backward(enough, epoch)
            total, count = total + loss * len(indices), count + len(indices)
            self._done += 1
            if self._context.is_stopping():
                self._save()
                raise Interrupted(f"stopped after step {self._done} as asked")
        return total / count if count else 0.0

    def _batches(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        order = permutation(self._backend.num_samples, self._config.seed, epoch)
        first = self._done - epoch * self._steps_per_epoch
        for step in range(first, self._steps_per_epoch):
            yield order[step * self._batch : (step + 1) * self._batch]

    def _backward(self, indices: NDArray[np.int64], epoch: int) -> float:
        """Make a step; return its loss."""
        loss = self._backend.backward(indices, epoch, (self._config.seed, self._done))
        if not np.isfinite(loss):
            raise NonFiniteLoss(self._context.node.name, self._done + 1, loss)
        self._backend.step(self._done)
        return loss

    def _validate(self, epoch: int) -> Validation:
        begun, loss, correct = time.perf_counter(), 0.0, 0.0
        backend, total = self._backend, self._backend.num_validation
        backend.set_training(False)
        for first in range(0, total, self._batch):
            with self._pace.computing():
                sums = backend.evaluate(first, min(first + self._batch, total))
            loss, correct = loss + sums[0], correct + sums[1]
        return finite_validation(
            self._context.node.name,
            step=self._done,
            epoch=epoch,
            loss=loss / total,
            accuracy=correct / total if backend.has_accuracy else None,
            seconds=time.perf_counter() - begun,
        )

    def _save(self) -> None:
        folder = self._config.checkpoint_folder
        arrays: dict[str, NDArray[Any]] = {**self._backend.checkpoint(), _STEP: np.array([self._done])}
        atomic_write(folder / f"step-{self._done:08d}.safetensors", save(arrays, self._settings))
        for old in checkpoints_in(folder)[:-_MAX_CHECKPOINTS]:
            old.unlink()

    def _restored(self) -> int:
        """Load the last checkpoint; return its step."""
        folder = self._config.checkpoint_folder
        require_checkpoint(folder)
        newest = checkpoints_in(folder)[-1]
        try:
            with safe_open(newest, "numpy") as file:
                refuse_other_settings(file.metadata() or {}, self._settings, newest)
            arrays = load_file(newest)
            self._backend.restore(arrays)
            step = int(arrays[_STEP][0])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InvalidFile(f"checkpoint {newest} does not fit this task: {first_line(error)}") from error
        end = end_of_run(step, self._epochs, self._steps_per_epoch)
        self._context.notify(Event(step=step, kind="resumed", message=f"resumed after step {step} from {newest}{end}"))
        return step


PRELOAD = ["evener.search.thin_trial"]
_END, _CONTINUE = b"over", b"on"


class ThinTrial:
    """The process of a thin trial, as `TrialProcesses` describes."""

    def __init__(self, processes: LocalProcesses, nodes: Sequence[NodeSpec], config: RunConfig) -> None:
        (self._node,) = nodes
        self._process = processes.start(
            self._node.name, _run_node, self._node, config, cores=self._node.cores, threads=self._node.threads
        )
        self.processes: Sequence[LocalProcess] = [self._process]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """Send the answer to the end of an epoch to the process."""
        if isinstance(event, Epoch):
            self._process.tell(_END if is_over else _CONTINUE)

    def stop(self) -> None:
        """Ask the process to stop after its step, with a checkpoint."""
        self._process.request_stop()

    def is_silent(self, _now: float) -> bool:
        """Return False: a single process cannot hang on others, and its end is noticed."""
        return False

    def error(self) -> EvenerError:
        """Return the reason why the process failed."""
        return failure_of(self._process, self._node)

    def close(self) -> None:
        """Do nothing: the run holds no other resources."""


def _run_node(parent: Parent, node: NodeSpec, config: RunConfig) -> None:
    stopping: list[bool] = []
    parent.on_stop(lambda: stopping.append(True))

    def notify(event: RunEvent) -> None:
        parent.send(encode_events([event]))

    def is_over(epoch: Epoch) -> bool:
        notify(epoch)
        return parent.hear() == _END

    train_thin(ThinContext(node, notify, is_over, lambda: bool(stopping)), config)
