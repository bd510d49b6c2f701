"""Learning rates and momenta of a training of Ultralytics, step by step, as its loop sets them batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmUpSchedule(LRScheduler):
    """Rates rise (those of biases fall) while it warms up, then follow the epochs; momentum rises too.

    Args:
        optimizer: of `trainer`.
        trainer: of Ultralytics, which knows the settings.
        batches: of an epoch.
    """

    def __init__(self, optimizer: Optimizer, trainer: Any, batches: int) -> None:
        self._trainer, self._batches = trainer, batches
        self._warm_up = trainer._get_warmup_iterations(batches)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Of every group in the step that comes."""
        step, args = self.last_epoch, self._trainer.args
        factor = self._trainer.lf(step // self._batches)
        rates: list[float | Tensor] = [float(group["initial_lr"]) * factor for group in self.optimizer.param_groups]
        if not self._warm_up or step > self._warm_up:
            return rates
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = self._between(step, args.warmup_momentum, args.momentum)
        firsts = [args.warmup_bias_lr if g.get("param_group") == "bias" else 0.0 for g in self.optimizer.param_groups]
        return [self._between(step, first, float(rate)) for first, rate in zip(firsts, rates, strict=True)]

    def _between(self, step: int, first: float, last: float) -> float:
        return float(np.interp(step, [0, self._warm_up], [first, last]))
