"""A model of Ultralytics whose training pass spans all ranks, as DistributedDataParallel does in its own runs.

The trainer finds the model itself in `module`, as it does with DistributedDataParallel, where it copies and saves it.

A batch is computed here to its end: forward, backward, and the sums of gradients where a step follows; Ultralytics'
loop finds nothing left to do for its own backward pass. So all communication happens in one place, and the
remaining ranks repeat it there when one is lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.data.loader import seed_all
from evener.frontends.yolo.generations import Generations
from evener.frontends.yolo.step_gradients import StepGradients
from evener.parallel.shared_statistics import SharedStatistics
from evener.records.errors import NodeLost

_NEVER = 1 << 40
"""Batches of a step that keep the loop from making one now."""


class DistributedModel(nn.Module):
    """A model of which every rank computes its part of a batch; BatchNorms have the statistics of the whole.

    Args:
        module: the model.
        group: the ranks.
        trainer: of Ultralytics, set up; its loader gives the batches that the model is called with.
        generations: of a run that goes on without some ranks; None: it does not.

    Attributes:
        gradients: of all ranks; None of a rank that is alone.
        done: the last batch of the training, from 1, that was computed, before this run began or in it.
        told: the loss of a batch and its parts, as returned to the loop.
    """

    def __init__(self, module: nn.Module, group: Group, trainer: Any, generations: Generations | None) -> None:
        super().__init__()
        self.module = module
        self.gradients = None if group.is_alone else StepGradients(module, group, trainer)
        self.done = trainer.start_epoch * len(trainer.train_loader)
        self.told: tuple[Tensor, dict[str, Tensor]] = torch.zeros(1), {}
        self._group, self._trainer, self._generations = group, trainer, generations
        self._shared = SharedStatistics(lambda _: group)
        self._before = [buffer.clone() for buffer in module.buffers()] if generations is not None else []
        self._kept_after = -1

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and its parts; gradients are those of all ranks if a step follows."""
        number = self._trainer.train_loader.part.step
        if self.gradients is not None:
            self._trainer.accumulate = _NEVER
        while number > self.done:
            try:
                self._compute(number, batch)
            except (RuntimeError, NodeLost) as error:
                if self._generations is None:
                    raise
                self._generations.go_on(error)
                batch = None
        loss, parts = self.told
        return loss.detach().requires_grad_(), parts

    def restart(self, done: int) -> None:
        """Repeat an epoch that began after `done` batches."""
        self.done = done
        if self.gradients is not None:
            self.gradients.restart()
        self._kept_after = -1

    @torch.no_grad()
    def take_back(self, done: int) -> None:
        """Discard all batches after the first `done`, which the remaining ranks repeat after a loss."""
        assert self.gradients is not None
        self.gradients.forget()
        if self._kept_after == done:
            torch._foreach_copy_(list(self.module.buffers()), self._before)
        self.done = done

    def _compute(self, number: int, batch: Any) -> None:
        """Compute batches up to `number`, among them earlier ones whose gradients were lost with a rank."""
        for again in range(self.done + 1, number):
            self._pass(self._read(again))
            batch = None  # it was loaded ahead for the previous ranks
        self._pass(self._read(number) if batch is None else batch)

    def _read(self, number: int) -> Any:
        """Read this rank's part of a batch, with the current ranks."""
        return self._trainer.preprocess_batch(self._trainer.train_loader.read(number))

    def _pass(self, batch: Any) -> None:
        """Forward and backward, and the sums of gradients if a step follows."""
        part, timer = self._trainer.train_loader.part, self._group.timer
        if self._generations is not None and self._generations.batch == self.done:
            self._keep()
        completes = self.gradients is not None and self.gradients.begin(part.step - 1)
        seed_all(self._trainer.args.seed, part.step, self._group.rank, device=self._group.device)
        loss, parts = self._outputs(batch, len(part.indices) > 0)
        with torch.autocast(self._group.device.type, enabled=False):
            self._trainer.scaler.scale(loss.sum()).backward()
        self.told = loss.detach(), parts
        if self.gradients is not None and completes:
            timer.pause(before_update=self.gradients.is_due)
            self.gradients.finish(part.step - 1)
            if self.gradients.is_due:
                self._trainer.accumulate = 1
        self.done = part.step
        if self._generations is not None and completes:
            self._generations.completed(part.step)

    def _outputs(self, batch: Any, is_counted: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of the module for a batch of all ranks."""
        if self._group.size == 1:
            return self.module(batch)  # type: ignore[no-any-return]
        self._shared.counting = is_counted
        with self._shared:
            return self.module(batch)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _keep(self) -> None:
        """Copy the running statistics: the forward pass changes them, and may have to be repeated."""
        torch._foreach_copy_(self._before, list(self.module.buffers()))
        self._kept_after = self.done
