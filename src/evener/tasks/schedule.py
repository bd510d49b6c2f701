"""How the learning rate of the built-in tasks goes up and down; loading it needs no PyTorch."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

RISE = 0.2


def share_of_peak(step: int, steps: int) -> float:
    """Rate in `step`, from 0, of `steps`, as a share of the largest.

    It rises in a line over the first fifth, then falls along half a cosine to nothing. Steps after the last keep the
    last rate, so that a run may repeat some after the loss of a node.
    """
    passed = min(step + 1, steps) / (steps + 1)
    if passed < RISE:
        return passed / RISE
    return (1 + math.cos(math.pi * (passed - RISE) / (1 - RISE))) / 2


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate goes up to the optimiser's own and down to nothing, see `share_of_peak`."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, partial(share_of_peak, steps=steps))
