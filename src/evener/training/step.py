"""A step on one rank: load, forward, backward, update; its share of a validation; its report to the others.

Reports travel while the next step computes, so no rank waits for them. All ranks decide from the same reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.data.loader import Loader, collect, split_batch, to_device
from evener.parallel.parallel_model import count_correct
from evener.records.errors import noting
from evener.records.history import Entry, NodeWork
from evener.system import accelerators
from evener.training.training import Training, seed_update


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step on this rank.

    Attributes:
        epoch: from 0.
        samples: of its replica; `total` of all ranks.
        loss: its part of the mean loss, a scalar; None if it is unknown.
        rate: learning rate, which must be the same on all ranks; 0 if it is not compared.
        weight: one of the weights, which must be the same on all ranks; 0 if it is not compared.
        has_new_loss: whether the loss was computed in another way than before.
    """

    epoch: int
    samples: int
    total: int
    loss: Tensor | float | None
    rate: float = 0.0
    weight: float = 0.0
    has_new_loss: bool = False


class TrainStep:
    """Performs steps of a training on this rank; gradients are summed over the ranks.

    Args:
        training: of this rank.
        fence: called before the weights are changed.
        keep: (step) -> whether its gradients are saved for later instead of changing the weights now.
    """

    def __init__(
        self,
        training: Training,
        fence: Callable[[], None] | None = None,
        keep: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._fence, self._keep = fence, keep
        self._model, self._optimizer, self._scheduler = training.model, training.optimizer, training.scheduler
        self._context, self._clip_norm = training.context, training.context.task.clip_norm
        self._arithmetic = training.context.arithmetic

    def __call__(self, loader: Loader) -> StepResult:
        """Perform the loader's next step."""
        timer = self._model.group.timer
        parts, losses = [], []
        timer.resume("io")
        for part, inputs, targets in loader.next_step():
            timer.pause()
            timer.pace.expect(len(part.indices))
            timer.resume("fb")
            losses.append(
                self._model.add_gradients(
                    self._arithmetic.prepare(inputs),
                    self._arithmetic.prepare(targets),
                    samples=len(part.indices),
                    total=part.total,
                    is_last=part.is_last,
                )
            )
            parts.append(part)
            timer.pause()
            timer.resume("io")
        timer.pause()
        timer.resume("wu")
        self._update(parts[-1].step)
        timer.pause()
        return StepResult(
            epoch=parts[-1].epoch,
            samples=sum(len(part.indices) for part in parts),
            total=parts[-1].total,
            loss=torch.stack(losses).sum(),
        )

    def _update(self, step: int) -> None:
        scaler = self._arithmetic.scaler
        if self._clip_norm is not None:
            scaler.unscale_(self._optimizer.inner)
            self._model.clip(self._clip_norm)
        if self._fence is not None:
            self._fence()
        if self._keep(step):
            self._optimizer.clear_gradients()
        else:
            self.change(step)

    def change(self, step: int) -> None:
        """Update the weights with the complete gradients of `step`, without waiting for other ranks."""
        scaler = self._arithmetic.scaler
        seed_update(self._context, step)
        self._optimizer.step(scaler)
        scaler.update()
        if self._scheduler is not None:
            with noting("scheduler, at its step"):
                self._scheduler.step()
        self._optimizer.clear_gradients()


@torch.no_grad()
def evaluate(training: Training, sizes: Sequence[int], batch: int) -> tuple[float, float | None]:
    """Return the mean loss over all validation samples, and the accuracy (None if the task does not count it).

    Args:
        training: gives task, data and this rank's part of the model.
        sizes: samples for every replica, in order.
        batch: samples to compute at once.
    """
    model, task = training.model, training.context.task
    start = sum(sizes[: model.replica])
    indices = np.arange(start, start + sizes[model.replica], dtype=np.int64)
    sums = torch.zeros(2, dtype=torch.float64)
    model.train(False)
    model.group.timer.resume("fb")
    for i in range(0, len(indices), batch):
        sums += _validation_sums(training, indices[i : i + batch])
    model.group.timer.discard()
    model.train()
    loss, correct = _total(sums, model.group)
    count = sum(sizes)
    return loss / count, None if task.correct is None else correct / count


def _validation_sums(training: Training, indices: Any) -> Tensor:
    """Return the sum of losses and the number of correct samples of `indices`, shape (2,), on the reporting rank."""
    context, model = training.context, training.model
    assert context.validation_data is not None
    batch = to_device(split_batch(collect(context.validation_data, indices, seed=0, epoch=0)), model.group.device)
    inputs, targets = context.arithmetic.prepare(batch)
    outputs = model.predict(inputs)
    if not model.is_reporter:
        return torch.zeros(2, dtype=torch.float64)
    with context.arithmetic.autocast():
        loss = context.task.loss(outputs, targets)
    correct = count_correct(context.task, outputs, targets).to(loss.device, accelerators.widest(loss.device))
    return torch.stack((accelerators.wide(loss) * len(indices), correct)).cpu().double()


def _total(sums: Tensor, group: Group) -> tuple[float, float]:
    rows = [np.frombuffer(row, dtype=np.float64) for row in group.all_gather_bytes(sums.numpy().tobytes())]
    loss, correct = np.sum(rows, axis=0)
    return float(loss), float(correct)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The report of a step on one rank.

    Attributes:
        step: from 1.
        samples: of this rank's replica; `total` of all.
        epoch: from 0.
        loss: this rank's part of the mean loss of the step.
        wall: seconds of the step on this rank.
        timed_samples: samples of the seconds of IO, FB and WU (on a GPU, of a previous step).
        sent: bytes handed to collectives.
        stop: 1 if this rank was asked to stop.
        save: 1 if it is time for a checkpoint.
        leave: 1 if other ranks are to take part after this step.
        behind: 1 if this rank does not have the state of the training yet.
        has_loss: 1 if the loss is known.
        rate: see `StepResult`.
        weight: see `StepResult`.
        new_loss: 1 if the loss was computed in another way than before.
        cpu: seconds of CPU time of this rank's process.
        memory: bytes that it held at its peak until now.
    """

    step: int
    samples: int
    total: int
    epoch: int
    loss: float
    wall: float
    timed_samples: int
    io: float
    fb: float
    wu: float
    sent: int
    stop: int
    save: int
    leave: int
    has_loss: int
    rate: float
    weight: float
    new_loss: int = 0
    behind: int = 0
    cpu: float = 0.0
    memory: int = 0

    @property
    def computing(self) -> float:
        """Seconds of all phases."""
        return self.io + self.fb + self.wu


_TYPES: tuple[type, ...] = tuple({"int": int, "float": float}[str(f.type)] for f in fields(StepReport))


class Reports:
    """Reports of this rank, sent and not yet read, oldest first: a row of numbers each."""

    def __init__(self, group: Group) -> None:
        self._mesh = group.reports
        self._own: deque[bytes] = deque()

    def __len__(self) -> int:
        """Number of steps whose reports were sent and not read."""
        return len(self._own)

    def send(self, report: StepReport) -> None:
        """Send a report to the others; returns at once."""
        row = np.asarray(astuple(report), dtype=np.float64).tobytes()
        self._own.append(row)
        if self._mesh is not None:
            self._mesh.send(row)

    def receive(self) -> list[StepReport]:
        """Wait for all ranks' reports of the oldest step; return them in order of ranks."""
        report = self._own.popleft()
        rows = [report] if self._mesh is None else self._mesh.receive()
        return [_report(np.frombuffer(row).tolist()) for row in rows]


def entry_of(reports: Sequence[StepReport], columns: Sequence[str]) -> Entry:
    """Return one step of the history from every rank's report; `columns` has the ranks' columns, in order."""
    first = reports[0]
    return Entry(
        step=first.step,
        epoch=first.epoch,
        samples=first.total,
        loss=sum(report.loss for report in reports) * first.total,
        num_unknown=0 if first.has_loss else first.total,
        seconds=max(report.wall for report in reports),
        steps=1,
        nodes={
            column: NodeWork(
                samples=report.samples,
                compute_seconds=report.fb,
                sent=report.sent,
                io_seconds=report.io,
                update_seconds=report.wu,
                wait_seconds=max(0.0, report.wall - report.computing) if len(reports) > 1 else 0.0,
                cpu_seconds=report.cpu,
                memory=report.memory,
            )
            for column, report in zip(columns, reports, strict=True)
        },
    )


def _report(row: list[float]) -> StepReport:
    return StepReport(**{f.name: t(v) for f, t, v in zip(fields(StepReport), _TYPES, row, strict=True)})
