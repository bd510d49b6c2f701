"""The validation of a BatchTask: loss and metrics over all validation samples, and what the task validates itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.frontends.programs.batch_loss import BatchLoss
from evener.frontends.programs.session import Run
from evener.records.errors import InvalidInput
from evener.records.task import BatchTask


@torch.no_grad()
def validate(
    run: Run,
    task: BatchTask,
    model: nn.Module,
    loaders: Sequence[Any],
    placed: Callable[[Any], Any],
    loss: BatchLoss,
) -> float | None:
    """Validate after an epoch and keep what came of it; the loss, or None if the task has no validation.

    Args:
        run: of the nodes, all of which call this.
        task: that is trained.
        model: in training; it is so again afterwards.
        loaders: of the validation data, if there are any.
        placed: a batch -> the same where it is computed.
        loss: of its batches.

    Raises:
        InvalidInput: nothing says what the loss of the validation is.
    """
    if not loaders and task.validate is None:
        return None
    begin = time.perf_counter()
    model.eval()
    found = _means(run, task, model, loaders[0], placed, loss) if loaders else {}
    found |= {name: float(value) for name, value in _own(run, task, model).items()}
    model.train()
    if "loss" not in found:
        raise InvalidInput("BatchTask.validate must return a loss, too, where there is no validation_data")
    seconds, mean = time.perf_counter() - begin, found.pop("loss")
    run.steps.validated(loss=mean, accuracy=found.pop("accuracy", None), metrics=found, seconds=seconds)
    run.steps.restart_clock()
    return mean


def _means(
    run: Run,
    task: BatchTask,
    model: nn.Module,
    loader: Any,
    placed: Callable[[Any], Any],
    loss: BatchLoss,
) -> dict[str, float]:
    """Of the loss and of every metric: sums over all samples by their numbers."""
    sums = torch.zeros(1 + len(task.metrics), 2, dtype=torch.float64)
    for batch in loader:
        there = placed(batch)
        sums[0] += loss.sums(there)
        for row, metric in enumerate(task.metrics.values(), start=1):
            sums[row] += _sum_and_number(metric(model, there), run)
    total = run.sum(sums)
    means = (total[:, 0] / total[:, 1]).tolist()
    return dict(zip(("loss", *task.metrics), means, strict=True))


def _sum_and_number(value: Any, run: Run) -> Tensor:
    """Of a metric: as it is, or of a mean over the samples of this node."""
    assert run.part is not None
    if isinstance(value, tuple):
        return torch.tensor([float(part) for part in value], dtype=torch.float64)
    return torch.tensor([float(value) * run.part.samples, run.part.samples], dtype=torch.float64)


def _own(run: Run, task: BatchTask, model: nn.Module) -> Mapping[str, Any]:
    return {} if task.validate is None else task.validate(model, run)
