"""The validation of a BatchTask, whose batches the nodes divide: loss and metrics over all samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.frontends.programs.batch_loss import BatchLoss
from evener.frontends.programs.batch_parts import cut_rows, part_of, rows_of
from evener.frontends.programs.run import Run
from evener.records.errors import InvalidInput, InvalidValue, require
from evener.records.task import BatchTask

_ALIKE = 1e-3
"""Largest relative difference between a metric of samples and the mean of their parts, by rounding."""


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
        run: the nodes; all of them call this.
        task: that is trained.
        model: in training mode, before and after.
        loaders: of the validation data; may be empty.
        placed: moves a batch to the device.
        loss: of a batch.

    Raises:
        InvalidInput: the validation returns no loss, or a metric is no mean over samples; raised on all nodes.
    """
    if not loaders and task.validate is None:
        return None
    begin = time.perf_counter()
    model.eval()
    run.begin_evaluation()
    values = _means(run, task, model, loaders[0], placed, loss) if loaders else {}
    values |= _own(run, task, model)
    model.train()
    if "loss" not in values:
        raise InvalidInput("BatchTask.validate must return a loss, too, where there is no validation_data")
    seconds, mean = time.perf_counter() - begin, values.pop("loss")
    run.steps.validated(loss=mean, accuracy=values.pop("accuracy", None), metrics=values, seconds=seconds)
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
    is_first, divided = run.size > 1 and run.steps.epoch == 0, ""
    for number, batch in enumerate(loader):
        there = placed(batch)
        is_compared = is_first and number == 0 and _samples(run) > 1
        sums[0] += loss.sums(there)
        for row, (name, metric) in enumerate(task.metrics.items(), start=1):
            of_batch = _sum_and_number(f"BatchTask.metrics[{name!r}]", metric(model, there), _samples(run))
            sums[row] += of_batch
            if is_compared and not divided:
                divided = _why_no_mean(name, metric, model, there, of_batch)
    if is_first:
        reasons = run.group.all_gather_bytes(divided.encode())
        if reason := next(filter(None, reasons), b""):
            raise InvalidInput(reason.decode())
    total = run.sum(sums)
    means = (total[:, 0] / total[:, 1]).tolist()
    return dict(zip(("loss", *task.metrics), means, strict=True))


def _samples(run: Run) -> int:
    assert run.part is not None
    return run.part.samples


def _why_no_mean(name: str, metric: Callable[[Any, Any], Any], model: nn.Module, batch: Any, of_batch: Tensor) -> str:
    """Return why a metric is no mean over samples, by two halves of `batch`; empty if it is, or cannot be halved."""
    try:
        rows = rows_of(batch, 0)
        halves = [part_of(rank, (rows // 2, rows - rows // 2)) for rank in range(2)]
        parts = [_sum_and_number(name, metric(model, cut_rows(batch, half, 0)), half.samples) for half in halves]
    except Exception:  # a metric that wants a whole batch, or one row: nothing can be said
        return ""
    sums = parts[0] + parts[1]
    whole, mean = of_batch[0] / of_batch[1], sums[0] / sums[1]
    if torch.isclose(whole, mean, rtol=_ALIKE, atol=_ALIKE, equal_nan=True):
        return ""
    return (
        f"BatchTask.metrics[{name!r}] is {float(whole):g} of {rows} samples and {float(mean):g} as the mean of their "
        "halves: on nodes that divide batches it would differ from one process; return a mean over the samples or "
        "(sum, number), or measure it in BatchTask.validate"
    )


def _sum_and_number(what: str, value: Any, samples: int) -> Tensor:
    """Return a metric as (sum, number); a plain number is a mean over `samples`.

    Raises:
        InvalidInput: it is neither; `what` says of what.
    """
    pair = value if isinstance(value, tuple) else (value, samples)
    numbers = [_number(what, part) for part in pair]
    require(len(numbers) == 2, what, value, "a function that returns a mean, or a sum and a number")
    mean = 1.0 if isinstance(value, tuple) else samples
    return torch.tensor([numbers[0] * mean, numbers[1]], dtype=torch.float64)


def _own(run: Run, task: BatchTask, model: nn.Module) -> dict[str, float]:
    """Return what the task's own validation measures. Raises InvalidInput: it is no numbers by name."""
    if task.validate is None:
        return {}
    values = task.validate(model, run)
    require(isinstance(values, Mapping), "BatchTask.validate", values, 'a function that returns {"loss": 0.5} or more')
    return {str(name): _number(f"BatchTask.validate[{name!r}]", value) for name, value in values.items()}


def _number(what: str, value: Any) -> float:
    """Return a number that the task returned. Raises InvalidInput: it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of a tensor with several elements
        raise InvalidValue(what, value, "a function that returns a number") from error
