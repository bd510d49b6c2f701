"""The learning-rate schedule of the built-in tasks."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evener.tasks.rates import share_of_peak


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate goes up to the optimiser's own and down to nothing, see `share_of_peak`."""
    return LambdaLR(optimizer, partial(share_of_peak, steps=steps))
