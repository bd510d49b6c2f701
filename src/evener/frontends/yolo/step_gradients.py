"""Gradients of a step of Ultralytics' loop: summed over the ranks while the last batch of the step goes backward.

The loop steps when so many batches have gone by since its last step; how many rises while it warms up. Ranks have to
know before the backward pass of a batch whether a step follows, to let gradients travel meanwhile; so it is computed
here and passed to the loop.

In a run that goes on without some ranks, and in a trial of a search, gradients are summed at the end of an epoch, too:
what the batches of an epoch have added is then known to all, and none of an earlier epoch has to be done again.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.parallel.gradient_sums import ReplicaSums

_MOST = 0.25
"""Of the gradients travel together."""


class StepGradients:
    """The gradients of a model of Ultralytics; all ranks have one.

    Args:
        model: whose weights are trained.
        group: the ranks.
        trainer: of Ultralytics, set up, which has made no step.
        keeps_state: whether gradients are complete at the end of every epoch in any case.

    Attributes:
        is_due: whether the optimiser steps after this batch.
        is_complete: whether the gradients of this batch are, or will be, summed over the ranks.
        last: batch of the training, from 0, after which it stepped last; -1: none.
        summed: gradients that are complete and wait for a step, one a weight; empty if there are none.
    """

    def __init__(self, model: nn.Module, group: Group, trainer: Any, *, keeps_state: bool = False) -> None:
        self._sums = ReplicaSums(model, group, _MOST)
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sums_every = len(trainer.train_loader) if group.is_elastic or keeps_state else 0
        self._warm_up = trainer._get_warmup_iterations(len(trainer.train_loader))
        self._batches = trainer.accumulate
        self.last, self.is_due, self.is_complete = -1, False, True
        self.summed: list[Tensor | None] = []
        self._keeping = ExitStack()

    def begin(self, number: int) -> bool:
        """Batch `number`, from 0, is computed now; whether `finish` is to follow, or gradients stay on each rank."""
        self._keeping.close()
        self.is_due = number - self.last >= self._batches_of_step(number)
        self.is_complete = self.is_due or (self._sums_every > 0 and (number + 1) % self._sums_every == 0)
        if not self.is_complete:
            self._keeping.enter_context(self._sums.accumulating())
        return self.is_complete

    @torch.no_grad()
    def finish(self, number: int) -> None:
        """Let all gradients be the sums over the ranks; they stay where they are if the optimiser steps now."""
        self._sums.finish()
        for weight, summed in zip(self._weights, self.summed, strict=False):
            if summed is not None:
                weight.grad = summed if weight.grad is None else weight.grad + summed
        self.summed = []
        if self.is_due:
            self.last = number
        else:
            self.summed = [weight.grad for weight in self._weights]
            self._clear()

    def forget(self) -> None:
        """Discard what was computed since gradients were complete; it is repeated."""
        self._keeping.close()
        self._sums.forget()
        self._clear()

    def restart(self) -> None:
        """Begin an epoch again, as if no step had been made."""
        self.last, self.summed = -1, []

    def _clear(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def _batches_of_step(self, number: int) -> int:
        return batches_of_step(number, self._warm_up, self._batches)


def batches_of_step(number: int, warm_up: int, batches: int) -> int:
    """Batches of the step under way in batch `number`: they rise to `batches` while the first `warm_up` go by."""
    if not warm_up or number > warm_up:
        return int(batches)
    return max(1, int(np.interp(number, [0, warm_up], [1, batches]).round()))


class Cadence(NamedTuple):
    """How often a training does something, on the average over all of its batches.

    Attributes:
        batches_of_update: batches of one update of the optimiser.
        batches_of_exchange: batches of one exchange of gradients.
    """

    batches_of_update: float
    batches_of_exchange: float


def cadence(trainer: Any, *, is_elastic: bool) -> Cadence:
    """That of a training by `trainer`, set up; with `is_elastic`, gradients are also summed at the end of an epoch."""
    epoch = len(trainer.train_loader)
    total, warm_up = epoch * trainer.epochs, trainer._get_warmup_iterations(epoch)
    last, updates, sums = -1, 0, 0
    for number in range(total):
        batches = trainer.accumulate if number > warm_up else batches_of_step(number, warm_up, trainer.accumulate)
        is_due = number - last >= batches
        last, updates = (number, updates + 1) if is_due else (last, updates)
        sums += is_due or (is_elastic and (number + 1) % epoch == 0)
    return Cadence(total / max(1, updates), total / max(1, sums))
