"""One optimiser step of one rank: load, forward, backward (gradients summed over the ranks), update."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.data import Loader, MicroBatch
from evener.parallel import DataParallel
from evener.task import Task
from evener.train.precision import Arithmetic


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step gave on this rank.

    Attributes:
        epoch: from 0.
        samples: computed here.
        total: samples of the step over all ranks.
        loss: sum over this rank's samples of their loss, divided by `total`; a scalar.
    """

    epoch: int
    samples: int
    total: int
    loss: Tensor


class TrainStep:
    """Performs steps of a task on this rank.

    Args:
        task: gives the loss and the bound on the gradient.
        replica: the model, joined with the other ranks'.
        optimizer: of its parameters.
        scheduler: stepped after every update; None for a constant rate.
        arithmetic: precision of computing.
    """

    def __init__(
        self,
        task: Task,
        replica: DataParallel,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        arithmetic: Arithmetic,
    ) -> None:
        self._task, self._replica, self._arithmetic = task, replica, arithmetic
        self._optimizer, self._scheduler = optimizer, scheduler

    def __call__(self, loader: Loader) -> Outcome:
        """Perform the loader's next step."""
        pace = self._replica.group.pace
        parts, losses = [], []
        pace.resume("io")
        for part, inputs, targets in loader.next_step():
            pace.pause()
            pace.expect(len(part.indices))
            pace.resume("fb")
            losses.append(self._forward_backward(part, inputs, targets))
            parts.append(part)
            pace.pause()
            pace.resume("io")
        pace.pause()
        pace.resume("wu")
        self._update()
        pace.pause()
        return Outcome(
            epoch=parts[-1].epoch,
            samples=sum(len(part.indices) for part in parts),
            total=parts[-1].total,
            loss=torch.stack(losses).sum(),
        )

    def _forward_backward(self, part: MicroBatch, inputs: Any, targets: Any) -> Tensor:
        """Add this micro-batch's gradients; its weighted loss. Gradients travel with the last micro-batch."""
        travelling = nullcontext() if part.is_last else self._replica.accumulating()
        present = nullcontext() if len(part.indices) else self._replica.without_samples()
        with travelling, present:
            with self._arithmetic.autocast():
                outputs = self._replica(self._arithmetic.prepare(inputs))
                loss = self._task.loss(outputs, self._arithmetic.prepare(targets))
            weighted = loss * (len(part.indices) / part.total)
            self._arithmetic.scaler.scale(weighted).backward()  # type: ignore[no-untyped-call]
        return weighted.detach().double()

    def _update(self) -> None:
        scaler = self._arithmetic.scaler
        if self._task.clip_norm is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._replica.model.parameters(), self._task.clip_norm)
        scaler.step(self._optimizer)
        scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
