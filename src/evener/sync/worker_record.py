"""All that a server knows of one worker: the one place for its leases, its speed and its counts.

A speed is known in seconds a sample: first as benchmarked, then as measured, smoothed. One bad measurement must not
make a node slow for good: it counts for a part, and never for more than a few times of what was known. Who was late is
taken to be slower than was known, so that the time for a much slower one is found soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from evener.sync.messages import Lease, WorkerTotals

_REMEMBERED = 4
"""Leases after whose answer a repeated contribution is known to be one."""
NEWEST = 0.25
"""Weight of the newest measurement: one slow report moves a share by a quarter of what a slow worker would lose."""
MOST_SLOWING = 4.0
"""By which one measurement may exceed what is known of a node's seconds a sample: it may have been stopped once."""
MOST_CLAIM = 10.0
"""How much faster than the median of all a node can be by its own word; each measurement then adds a third at most."""
LATE_SLOWING = 2.0
"""By which a node is taken to be slower that was late."""


class SpeedEstimate:
    """What is known of one node's speed.

    Args:
        seconds: a sample, if it was measured before.

    Attributes:
        seconds: a sample; None as long as nothing is known.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._is_measured = seconds is not None

    def benchmark(self, seconds: float) -> None:
        """Take the node's own benchmark for true, if it makes sense and nothing was measured yet."""
        if not self._is_measured and 0 < seconds < inf:
            self.seconds = seconds

    def bound_claim(self, usual: float) -> None:
        """Take a node of which nothing was measured yet for no more than `MOST_CLAIM` times as fast as is usual."""
        if not self._is_measured and self.seconds is not None:
            self.seconds = max(self.seconds, usual / MOST_CLAIM)

    def observe(self, num_samples: int, seconds: float) -> float:
        """Learn that `num_samples` took `seconds`; returns the seconds that can be believed."""
        known = self.seconds
        if num_samples <= 0 or not 0 < seconds < inf:
            return 0.0 if known is None else num_samples * known
        measured = seconds / num_samples
        if known is not None:
            most = MOST_SLOWING * known
            if measured > most:
                measured, seconds = most, num_samples * most
            measured = known + NEWEST * (measured - known)
        self.seconds, self._is_measured = measured, True
        return seconds

    def was_late(self) -> None:
        """The node has not done a step in the time in which it was expected to."""
        if self.seconds is not None:
            self.seconds *= LATE_SLOWING


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A worker that is, or once was, here.

    Attributes:
        name: of the worker.
        speed: of its work.
        totals: of what it did.
        is_here: whether it is a member of the run now.
        leases: that it has not answered, by number, the oldest first: whoever has one is awaited.
        answered: numbers of the leases that it answered last.
        arriving: number of the lease whose contribution was given memory to arrive in; None for none.
        turns: that it has had, for the bound of staleness.
        is_up_to_date: whether it knows all that it was sent; not so at first.
        knows_the_end: whether it was sent that the run is over.
    """

    name: str
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    is_here: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    arriving: int | None = None
    turns: int = 0
    is_up_to_date: bool = False
    knows_the_end: bool = False

    def enter(self) -> None:
        """It is here, and knows nothing."""
        self.is_here, self.is_up_to_date, self.knows_the_end = True, False, False
        self.turns, self.arriving = 0, None
        self.leases.clear()
        self.answered.clear()

    @property
    def oldest_lease(self) -> Lease | None:
        """What it works on; None if it waits."""
        return next(iter(self.leases.values())) if self.leases else None


def seconds_of(estimates: Sequence[SpeedEstimate]) -> list[float]:
    """Seconds a sample of each; who was never measured is taken for a middling one."""
    known = [one.seconds for one in estimates if one.seconds is not None]
    if len(known) == len(estimates):
        return known
    usual = median(known) if known else 1.0
    return [usual if one.seconds is None else one.seconds for one in estimates]
