"""The learning-rate schedule of the built-in tasks."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

RISE = 0.2


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate rises in a line over the first fifth of `steps`, then falls along half a cosine to nothing.

    Steps after the last keep the last rate, so that a run may repeat some after the loss of a node.
    """
    return LambdaLR(optimizer, partial(share_of_peak, steps=steps))


def share_of_peak(step: int, steps: int) -> float:
    """Rate in `step`, from 0, as a share of the optimiser's own (which is reached at the peak)."""
    passed = min(step + 1, steps) / (steps + 1)
    if passed < RISE:
        return passed / RISE
    return (1 + math.cos(math.pi * (passed - RISE) / (1 - RISE))) / 2
