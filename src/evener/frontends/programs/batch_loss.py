"""The loss of a BatchTask: the scalar for `backward()` in training, and its mean over many batches in a validation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evener.frontends.programs.run import Run
from evener.records.errors import InvalidInput
from evener.records.task import BatchTask
from evener.training.context import Arithmetic


class BatchLoss:
    """Computes the loss of this node's part of a batch.

    Args:
        run: of the nodes.
        task: with the loss function.
        model: that all nodes train.
        arithmetic: precision of the loss.
        batch_size: samples of a step.
    """

    def __init__(self, run: Run, task: BatchTask, model: nn.Module, arithmetic: Arithmetic, batch_size: int) -> None:
        self._run, self._task, self._model, self._arithmetic = run, task, model, arithmetic
        self._batch_size = batch_size

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss for `backward()`; every node calls this for its part of a batch."""
        value, number = self._computed(batch)
        return value if number is None else self._run.ratio(value, number)

    def sums(self, batch: Any) -> Tensor:
        """Return the validation loss of this node's part as (sum, divisor); shape (2,)."""
        value, number = self._computed(batch)
        part = self._run.part
        assert part is not None
        if number is not None:
            return torch.stack((value.cpu().double(), torch.as_tensor(float(number), dtype=torch.float64)))
        if self._task.count == "sum":  # of as many samples as in training
            return torch.tensor([float(value), part.samples / self._batch_size], dtype=torch.float64)
        count = float(self._task.count(batch)) if callable(self._task.count) else float(part.samples)
        return torch.tensor([float(value) * count if count else 0.0, count], dtype=torch.float64)

    def _computed(self, batch: Any) -> tuple[Tensor, Any]:
        """Return (mean or sum, None), or (numerator, denominator)."""
        with self._arithmetic.autocast():
            loss = self._task.loss(self._model, batch)
        value, number = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InvalidInput("BatchTask.loss must return a scalar, or a numerator and a denominator")
        return value.reshape(()), number
