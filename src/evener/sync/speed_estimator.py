"""How fast a node is: its seconds a sample, first as benchmarked, then as measured, smoothed; pure.

One bad measurement must not make a node slow for good: it counts for a part, and never for more than a few times of
what was known. Who was late is taken to be slower than was known, so that the time for a much slower one is found soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median

from evener.oracle.apportion import Worker

NEWEST = 0.25
"""Weight of the newest measurement: one slow report moves a share by a quarter of what a slow worker would lose."""
MOST_SLOWING = 4.0
"""By which one measurement may exceed what is known of a node's seconds a sample: it may have been stopped once."""
LATE_SLOWING = 2.0
"""By which a node is taken to be slower that was late."""

_EVEN = Worker(unit_seconds=1.0)


class SpeedEstimate:
    """What is known of one node's speed.

    Args:
        seconds: a sample, if it was measured before.

    Attributes:
        cost: of its samples; None as long as nothing is known.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.cost = None if seconds is None else Worker(unit_seconds=seconds)
        self._is_measured = seconds is not None

    def benchmark(self, seconds: float) -> None:
        """Take the node's own benchmark for true, if it makes sense and nothing was measured yet."""
        if not self._is_measured and 0 < seconds < inf:
            self.cost = Worker(unit_seconds=seconds)

    def observe(self, num_samples: int, seconds: float) -> float:
        """Learn that `num_samples` took `seconds`; returns the seconds that can be believed."""
        known = self.cost
        if num_samples <= 0 or not 0 < seconds < inf:
            return 0.0 if known is None else num_samples * known.unit_seconds
        measured = seconds / num_samples
        if known is not None:
            most = MOST_SLOWING * known.unit_seconds
            if measured > most:
                measured, seconds = most, num_samples * most
            measured = known.unit_seconds + NEWEST * (measured - known.unit_seconds)
        self.cost, self._is_measured = Worker(unit_seconds=measured), True
        return seconds

    def was_late(self) -> None:
        """The node has not done a step in the time in which it was expected to."""
        if self.cost is not None:
            self.cost = Worker(unit_seconds=LATE_SLOWING * self.cost.unit_seconds)


def costs_of(estimates: Sequence[SpeedEstimate]) -> list[Worker]:
    """What samples cost each; who was never measured is taken for a middling one."""
    known = [one.cost for one in estimates if one.cost is not None]
    if len(known) == len(estimates):
        return known
    usual = Worker(unit_seconds=median([cost.unit_seconds for cost in known])) if known else _EVEN
    return [one.cost or usual for one in estimates]
