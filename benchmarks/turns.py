"""Ways that take turns, so that whatever else the machine does meets them all; a ratio is that of one round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1) -> dict[str, list[T]]:
    """What every way gives in each of `rounds` rounds; those of the `warm_up` rounds before are left out."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name, way in ways.items():
            measured = way()
            if number >= 0:
                found[name].append(measured)
    return found


def beside(
    reference: Callable[[], float], ways: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """What every way gives in each of `rounds` rounds, and for each `reference`: the mean of right before and after.

    In one order of turns, whichever comes first may meet a machine whose clock is faster than for all that follow.
    """
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    before = reference()
    for _ in range(rounds):
        for name, way in ways.items():
            measured, after = way(), reference()
            found[name][0].append(measured)
            found[name][1].append((before + after) / 2)
            before = after
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """That `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, and their range: `1.99 (1.53 to 3.15)` in the format `.2f`."""

    median: float
    least: float
    most: float

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


def spread(values: Iterable[float]) -> Spread:
    """Of the values of some rounds."""
    found = sorted(values)
    return Spread(median(found), found[0], found[-1])


def ratios(own: Sequence[float], others: Sequence[float]) -> Spread:
    """Of one way's values over another's, round by round."""
    return spread(a / b for a, b in zip(own, others, strict=True))
