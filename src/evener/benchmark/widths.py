"""What becomes of small parts: speed of narrow convolutions, and the least that a pass of a layer takes."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.benchmark.clock import Clock
from evener.errors import require
from evener.profile import WidthEfficiency

_FILTERS = (4, 8, 16, 32, 64, 128, 256)
_CHANNELS, _SIDE = 64, 32
"""Of the images that are convolved."""
_LAYERS = 32
_LEAST_ROUNDS = 3


def measure_widths(device: torch.device, budget_seconds: float) -> tuple[WidthEfficiency, ...]:
    """FLOP/s of 3x3 convolutions of few filters, as fractions of those of the best of them.

    Args:
        device: to measure.
        budget_seconds: for all together, about; each width is timed thrice at least.

    Raises:
        InvalidValue: the budget is not positive.
    """
    require(budget_seconds > 0, "budget_seconds", budget_seconds, "positive")
    clock, images = Clock(device), torch.rand(4, _CHANNELS, _SIDE, _SIDE, device=device)
    weights = [torch.rand(filters, _CHANNELS, 3, 3, device=device) for filters in _FILTERS]
    seconds: list[list[float]] = [[] for _ in weights]
    start = time.perf_counter()
    with torch.no_grad():
        while len(seconds[0]) <= _LEAST_ROUNDS or time.perf_counter() - start < budget_seconds:
            for taken, weight in zip(seconds, weights, strict=True):
                taken.append(clock.time(partial(F.conv2d, images, weight, padding=1)))
    rates = [filters / median(taken[1:]) for filters, taken in zip(_FILTERS, seconds, strict=True)]
    return tuple(
        WidthEfficiency(filters=filters, efficiency=min(1.0, rate / max(rates)))
        for filters, rate in zip(_FILTERS, rates, strict=True)
    )


def measure_pass(device: torch.device, budget_seconds: float) -> float:
    """Seconds that one pass of one layer takes that has next to nothing to compute: the mean of forward and backward.

    Args:
        device: to measure.
        budget_seconds: for all rounds, about; there are three at least.

    Raises:
        InvalidValue: the budget is not positive.
    """
    require(budget_seconds > 0, "budget_seconds", budget_seconds, "positive")
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(_LAYERS))).to(device)
    clock, numbers, taken = Clock(device), torch.ones(1, 1, device=device), list[float]()

    def passes() -> None:
        made: Tensor = layers(numbers)
        torch.autograd.backward(made)

    start = time.perf_counter()
    while len(taken) <= _LEAST_ROUNDS or time.perf_counter() - start < budget_seconds:
        taken.append(clock.time(passes))
    return median(taken[1:]) / (2 * _LAYERS)
