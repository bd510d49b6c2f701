"""The validation of a BatchTask: loss and metrics over all samples, and the task's own validation."""

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
    """Validate after an epoch and record the results; return the loss, or None if the task has no validation.

    Args:
        run: of the nodes, all of which call this.
        task: that is trained.
        model: in training mode, before and after.
        loaders: of the validation data; may be empty.
        placed: moves a batch to the device.
        loss: of a batch.

    Raises:
        InvalidInput: the validation returns no loss.
    """
    if not loaders and task.validate is None:
        return None
    begin = time.perf_counter()
    model.eval()
    values = _means(run, task, model, loaders[0], placed, loss) if loaders else {}
    values |= {name: float(value) for name, value in _own(run, task, model).items()}
    model.train()
    if "loss" not in values:
        raise InvalidInput("BatchTask.validate must return a loss, too, where there is no validation_data")
    seconds, mean = time.perf_counter() - begin, values.pop("loss")
    run.steps.validated(loss=mean, accuracy=values.pop("accuracy", None), metrics=values, seconds=seconds)
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
    """Return loss and metrics as means over all samples of all nodes."""
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
    """Return a metric as (sum, number); a plain number is a mean over the samples of this node."""
    assert run.part is not None
    if isinstance(value, tuple):
        return torch.tensor([float(part) for part in value], dtype=torch.float64)
    return torch.tensor([float(value) * run.part.samples, run.part.samples], dtype=torch.float64)


def _own(run: Run, task: BatchTask, model: nn.Module) -> Mapping[str, Any]:
    return {} if task.validate is None else task.validate(model, run)
