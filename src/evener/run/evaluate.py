"""Validation: every rank computes its share of the validation data; sums are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.data.loader import collect, split_batch, to_device
from evener.parallel.parallel_model import ParallelModel
from evener.run.precision import Arithmetic
from evener.task import Task


@torch.no_grad()
def evaluate(
    task: Task,
    model: ParallelModel,
    dataset: Dataset[Any],
    sizes: Sequence[int],
    *,
    batch: int,
    arithmetic: Arithmetic,
) -> tuple[float, float | None]:
    """Mean loss over all validation samples, and the fraction that is right (None if the task does not say).

    Args:
        task: gives loss and measure.
        model: this rank's part in it.
        dataset: of validation samples.
        sizes: samples for every replica, in order.
        batch: samples to compute at once.
        arithmetic: precision of computing.
    """
    group = model.group
    start = sum(sizes[: model.replica])
    own = np.arange(start, start + sizes[model.replica], dtype=np.int64)
    sums = torch.zeros(2, dtype=torch.float64)
    model.train(False)
    group.timer.resume("fb")
    for i in range(0, len(own), batch):
        sums += _sums(task, model, dataset, own[i : i + batch], arithmetic)
    group.timer.discard()
    model.train()
    loss, correct = _total(sums, group)
    count = sum(sizes)
    return loss / count, None if task.correct is None else correct / count


def _sums(task: Task, model: ParallelModel, dataset: Dataset[Any], indices: Any, arithmetic: Arithmetic) -> Tensor:
    """Sum of losses and number of right answers of the samples `indices`, shape (2,), on the reporting rank."""
    batch = to_device(split_batch(collect(dataset, indices, seed=0, epoch=0)), model.group.device)
    inputs, targets = arithmetic.prepare(batch)
    outputs = model.predict(inputs)
    if not model.is_reporter:
        return torch.zeros(2, dtype=torch.float64)
    with arithmetic.autocast():
        loss = task.loss(outputs, targets)
    correct = _correct(task, outputs, targets)
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
