"""Gradients of a step of Ultralytics' loop: summed over the ranks while the last batch of the step goes backward.

The loop steps when so many batches have gone by since its last step; how many rises while it warms up. It looks after
the backward pass of a batch whether it steps, and ranks have to know before, to let gradients travel meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import nn

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
    """

    def __init__(self, model: nn.Module, group: Group, trainer: Any) -> None:
        self._sums = ReplicaSums(model, group, _MOST)
        self._warm_up = trainer._get_warmup_iterations(len(trainer.train_loader))
        self._batches = trainer.accumulate
        self._last, self._is_due = -1, False
        self._keeping = ExitStack()

    def begin(self, number: int) -> None:
        """Batch `number` of the training, from 0, is computed now; without a step after it, gradients stay here."""
        self._keeping.close()
        self._is_due = number - self._last >= self._batches_of_step(number)
        if not self._is_due:
            self._keeping.enter_context(self._sums.accumulating())

    def finish(self, number: int) -> None:
        """The optimiser steps after batch `number`: let all gradients be the sums over the ranks."""
        assert self._is_due, "the loop steps where it was not expected to"
        self._sums.finish()
        self._last, self._is_due = number, False

    def end(self) -> None:
        """The batch is over."""
        assert not self._is_due, "the loop does not step where it was expected to"

    def restart(self) -> None:
        """The loop does an epoch again, as if it had never stepped."""
        self._last = -1

    def _batches_of_step(self, number: int) -> int:
        if not self._warm_up or number > self._warm_up:
            return int(self._batches)
        return max(1, int(np.interp(number, [0, self._warm_up], [1, self._batches]).round()))
