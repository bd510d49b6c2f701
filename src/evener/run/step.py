"""What one rank computes: an optimiser step (load, forward, backward, update), and its share of a validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.data.loader import Loader, collect, split_batch, to_device
from evener.run.training import Training
from evener.task import Task


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave on this rank.

    Attributes:
        epoch: from 0.
        samples: of this rank's replica.
        total: samples of the step over all ranks.
        loss: this rank's part of the mean over all samples; a scalar.
    """

    epoch: int
    samples: int
    total: int
    loss: Tensor


class TrainStep:
    """Performs steps of a training on this rank; gradients are summed over the ranks."""

    def __init__(self, training: Training) -> None:
        self._model, self._optimizer, self._scheduler = training.model, training.optimizer, training.scheduler
        self._arithmetic, self._clip_norm = training.context.arithmetic, training.context.task.clip_norm

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
        self._update()
        timer.pause()
        return StepResult(
            epoch=parts[-1].epoch,
            samples=sum(len(part.indices) for part in parts),
            total=parts[-1].total,
            loss=torch.stack(losses).sum(),
        )

    def _update(self) -> None:
        scaler = self._arithmetic.scaler
        if self._clip_norm is not None:
            scaler.unscale_(self._optimizer)
            self._model.clip(self._clip_norm)
        scaler.step(self._optimizer)
        scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(training: Training, sizes: Sequence[int], batch: int) -> tuple[float, float | None]:
    """Mean loss over all validation samples, and the fraction that is right (None if the task does not say).

    Args:
        training: gives task, data and this rank's part of the model.
        sizes: samples for every replica, in order.
        batch: samples to compute at once.
    """
    model, task = training.model, training.context.task
    start = sum(sizes[: model.replica])
    own = np.arange(start, start + sizes[model.replica], dtype=np.int64)
    sums = torch.zeros(2, dtype=torch.float64)
    model.train(False)
    model.group.timer.resume("fb")
    for i in range(0, len(own), batch):
        sums += _validation_sums(training, own[i : i + batch])
    model.group.timer.discard()
    model.train()
    loss, correct = _total(sums, model.group)
    count = sum(sizes)
    return loss / count, None if task.correct is None else correct / count


def _validation_sums(training: Training, indices: Any) -> Tensor:
    """Sum of losses and number of right answers of the samples `indices`, shape (2,), on the reporting rank."""
    context, model = training.context, training.model
    assert context.validation_data is not None
    batch = to_device(split_batch(collect(context.validation_data, indices, seed=0, epoch=0)), model.group.device)
    inputs, targets = context.arithmetic.prepare(batch)
    outputs = model.predict(inputs)
    if not model.is_reporter:
        return torch.zeros(2, dtype=torch.float64)
    with context.arithmetic.autocast():
        loss = context.task.loss(outputs, targets)
    correct = _correct(context.task, outputs, targets)
    return torch.stack((loss.double() * len(indices), correct.double().to(loss.device))).cpu()


def _correct(task: Task, outputs: Any, targets: Any) -> Tensor:
    if task.correct is None:
        return torch.zeros(())
    if callable(task.correct):
        return torch.as_tensor(task.correct(outputs, targets)).detach()
    right: Tensor = (outputs.argmax(1) == targets).sum()
    return right


def _total(sums: Tensor, group: Group) -> tuple[float, float]:
    rows = [np.frombuffer(row, dtype=np.float64) for row in group.all_gather_bytes(sums.numpy().tobytes())]
    loss, correct = np.sum(rows, axis=0)
    return float(loss), float(correct)
