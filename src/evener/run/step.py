"""One optimiser step of one rank: load, forward, backward (gradients summed over the ranks), update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.data.loader import Loader
from evener.parallel.parallel_model import ParallelModel
from evener.run.precision import Arithmetic
from evener.task import Task


@dataclass(frozen=True, kw_only=True)
class Outcome:
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
    """Performs steps of a task on this rank.

    Args:
        task: gives the loss and the bound on the gradient.
        model: this rank's part in it.
        optimizer: of its parameters.
        scheduler: stepped after every update; None for a constant rate.
        arithmetic: precision of computing.
    """

    def __init__(
        self,
        task: Task,
        model: ParallelModel,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        arithmetic: Arithmetic,
    ) -> None:
        self._task, self._model, self._arithmetic = task, model, arithmetic
        self._optimizer, self._scheduler = optimizer, scheduler

    def __call__(self, loader: Loader) -> Outcome:
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
        return Outcome(
            epoch=parts[-1].epoch,
            samples=sum(len(part.indices) for part in parts),
            total=parts[-1].total,
            loss=torch.stack(losses).sum(),
        )

    def _update(self) -> None:
        scaler = self._arithmetic.scaler
        if self._task.clip_norm is not None:
            scaler.unscale_(self._optimizer)
            self._model.clip(self._task.clip_norm)
        scaler.step(self._optimizer)
        scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
