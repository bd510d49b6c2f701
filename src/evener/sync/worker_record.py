"""All that a server knows of one worker: the one place for its leases, its speed and its counts.

A speed is known in seconds a sample: first as benchmarked, then as measured, smoothed. One bad measurement must not
make a node slow for good: it counts for a part, and never for more than a few times of what was known. Who was late is
taken to be slower than was known, so that the time for a much slower one is found soon.

What is measured is the node's own word. The server sees how long a lease takes until its contribution is there, which
holds what is fixed in it, too: lines, encoding, waiting. In a good division that is as long for one as for another,
whatever part of it is fixed:

    seconds a sample, as seen:   usual / own   =   how often faster than is usual a node has been
    seconds a sample, believed:  usual / own  <=   twice that, and no bound for who is not faster than is usual

So nobody's share shrinks below a middling one by what was seen; who says to be faster than it is soon finishes last.
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
MOST_RISE = 2.0
"""By which a lease can make a node faster that began as a middling one, against its own word."""
MOST_AHEAD = 2.0
"""By which a node's word may exceed how often faster than is usual it was seen to be."""
_MAX_SENT_TIMES = 8
"""Leases of a worker whose times are remembered: more than it has at once."""
LATE_SLOWING = 2.0
"""By which a node is taken to be slower that was late."""


class SpeedEstimate:
    """What is known of one node's speed.

    Args:
        seconds: a sample, if it was measured before.

    Attributes:
        seconds: a sample; None as long as nothing is known.
        seen: seconds a sample between leases and their contributions; None as long as nobody looked.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.seen: float | None = None
        self._is_measured, self._is_rising = seconds is not None, False

    def benchmark(self, seconds: float) -> None:
        """Take the node's own benchmark for true, if it makes sense and nothing was measured yet."""
        if not self._is_measured and 0 < seconds < inf:
            self.seconds = seconds

    def bound_claim(self, usual: float) -> None:
        """Take a node that has shown nothing yet for no faster than is usual; it rises to what it shows."""
        if not self._is_measured and self.seconds is not None and self.seconds < usual:
            self.seconds, self._is_rising = usual, True

    def observe(self, num_samples: int, seconds: float, seen: float | None = None) -> float:
        """Learn that `num_samples` took `seconds` by the node's word; returns the seconds that can be believed.

        Args:
            num_samples: of a lease.
            seconds: that it computed, as it says.
            seen: seconds between the lease and its contribution; None if nobody looked.
        """
        known = self.seconds
        if seen and num_samples > 0:
            self.seen = _smoothed(self.seen, seen / num_samples)
        if num_samples <= 0 or not 0 < seconds < inf:
            return 0.0 if known is None else num_samples * known
        self.seconds, self._is_measured = self._learned(seconds / num_samples), True
        return seconds if known is None else min(seconds, num_samples * MOST_SLOWING * known)

    def _learned(self, measured: float) -> float:
        """Seconds a sample after another measurement."""
        known = self.seconds
        if not self._is_rising or known is None or measured >= known:
            return _smoothed(known, measured)
        risen = max(measured, known / MOST_RISE)
        self._is_rising = risen > measured
        return risen

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
        given: when it was sent leases that it has not answered, by whoever has a clock.
        begun: when it had answered the one before.
        answered: numbers of the leases that it answered last.
        arriving: number of the lease whose contribution was given memory to arrive in; None for none.
        turns: that it has had, for the bound of staleness.
        is_up_to_date: whether it knows all that it was sent; not so at first.
        knows_the_end: whether it was sent that the run is over.
        thin_since: when its line was found to be so thin that it is told to send less; None: it is not.
    """

    name: str
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    is_here: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    sent_at: dict[int, float] = field(default_factory=dict)
    begun: float = -inf
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    arriving: int | None = None
    turns: int = 0
    is_up_to_date: bool = False
    knows_the_end: bool = False
    thin_since: float | None = None

    def enter(self) -> None:
        """It is here, and knows nothing."""
        self.is_here, self.is_up_to_date, self.knows_the_end = True, False, False
        self.turns, self.arriving = 0, None
        self.begun = -inf
        self.leases.clear()
        self.sent_at.clear()
        self.answered.clear()

    def lease_sent(self, number: int, now: float) -> None:
        """A lease is sent; that it is told again changes nothing."""
        if number not in self.sent_at:
            self.sent_at[number] = now
            if len(self.sent_at) > _MAX_SENT_TIMES:
                del self.sent_at[next(iter(self.sent_at))]

    def seen(self, number: int, now: float) -> float | None:
        """Seconds that it had for a lease since that was sent, or since it answered the one before; None: unknown."""
        sent = self.sent_at.pop(number, None)
        if sent is None:
            return None
        begun, self.begun = max(sent, self.begun), now
        return now - begun

    @property
    def oldest_lease(self) -> Lease | None:
        """What it works on; None if it waits."""
        return next(iter(self.leases.values())) if self.leases else None


def seconds_of(estimates: Sequence[SpeedEstimate]) -> list[float]:
    """Seconds a sample of each, as far as they can be believed; who was never measured is taken for a middling one."""
    said, seen = list[float](), list[float]()
    for one in estimates:
        said.append(_middling(estimates) if one.seconds is None else one.seconds)
        if one.seen is not None:
            seen.append(one.seen)
    if len(seen) < 2:
        return said
    usual = _upper_median(said)
    scale = usual / (MOST_AHEAD * _upper_median(seen))
    for i, one in enumerate(estimates):
        if one.seen is not None and said[i] < usual:
            said[i] = max(said[i], min(usual, scale * one.seen))
    return said


def _middling(estimates: Sequence[SpeedEstimate]) -> float:
    known = [one.seconds for one in estimates if one.seconds is not None]
    return median(known) if known else 1.0


def _upper_median(values: Sequence[float]) -> float:
    """Of two in the middle the slower one: one of two nodes does not make itself the usual one."""
    return sorted(values)[len(values) // 2]


def _smoothed(known: float | None, measured: float) -> float:
    """What is known after another measurement."""
    return measured if known is None else known + NEWEST * (min(measured, MOST_SLOWING * known) - known)
