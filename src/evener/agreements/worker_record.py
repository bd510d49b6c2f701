"""The server's record of a worker: its leases, its speed and its counts.

A speed is known in seconds per sample of a full batch: first as benchmarked, then as measured, smoothed, by the median
of the last measurements, so that single slow steps of a busy machine move no shares. A bad measurement must not make a
node slow for good, so it counts only partly, and never more than a few times the known value. A late node counts as
slower than known, so that the time for a much slower one is found soon.

The measurements are reported by the node. The server also sees how long a lease takes until its contribution arrives,
which includes fixed costs: link, encoding, waiting. In a good division this time is equal for all nodes, whatever part
of it is fixed:

    seconds per sample, seen:       usual / own   =   factor by which a node has been faster than usual
    seconds per sample, believed:   usual / own  <=   twice that, no bound for nodes that are not faster than usual

So no node's share falls below a median one by the seen time, and a node that overstates its speed soon finishes last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from evener.agreements.messages import Lease, WorkerTotals

_NUM_ANSWERED = 4
"""Answered leases that are remembered to recognise repeated contributions."""
_NUM_MEASUREMENTS = 5
"""Measurements whose median counts, so that single slow steps do not move any shares."""
NEWEST = 0.25
"""Weight of the newest measurement: one slow report changes a share by a quarter of the loss of a slow worker."""
MAX_SLOWDOWN = 4.0
"""Limit of one measurement as a factor of the known seconds per sample: the node may have been stopped once."""
MAX_RISE = 2.0
"""Limit by which a lease can speed up a node that began as a median one, against its own report."""
MAX_AHEAD = 2.0
"""Limit by which a node's report may exceed the factor that was seen."""
_MAX_SENT_TIMES = 8
"""Leases of a worker whose times are remembered: more than it has at once."""
LATE_SLOWING = 2.0
"""Factor by which a late node counts as slower."""


class SpeedEstimate:
    """The estimated speed of one node.

    Args:
        seconds: seconds per sample, if it was measured before.

    Attributes:
        seconds: seconds per sample; None while it is unknown.
        seen: seconds per sample between leases and their contributions; None while it is unknown.
        fixed_samples: samples that cost as much as the fixed part of a step, as the node has measured; None if unknown.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.seen: float | None = None
        self.fixed_samples: float | None = None
        self._is_measured, self._is_rising = seconds is not None, False
        self._last: deque[float] = deque(maxlen=_NUM_MEASUREMENTS)

    def benchmark(self, seconds: float) -> None:
        """Use the node's own benchmark, if it is plausible and nothing was measured yet."""
        if not self._is_measured and 0 < seconds < inf:
            self.seconds = seconds

    def bound_claim(self, usual: float) -> None:
        """Bound the claim of a node without measurements by the usual speed; measurements can raise it."""
        if not self._is_measured and self.seconds is not None and self.seconds < usual:
            self.seconds, self._is_rising = usual, True

    def observe(self, num_samples: float, seconds: float, seen: float | None = None) -> float:
        """Add a reported measurement; return the seconds that can be believed.

        Args:
            num_samples: samples of a lease; of a part of a batch, those of full batches that take as long.
            seconds: reported seconds of the computation.
            seen: seconds between the lease and its contribution; None if unknown.
        """
        known = self.seconds
        if seen and num_samples > 0:
            self.seen = _smoothed(self.seen, seen / num_samples)
        if num_samples <= 0 or not 0 < seconds < inf:
            return 0.0 if known is None else num_samples * known
        self.seconds, self._is_measured = self._learned(seconds / num_samples), True
        return seconds if known is None else min(seconds, num_samples * MAX_SLOWDOWN * known)

    def _learned(self, measured: float) -> float:
        """Return the seconds per sample after another measurement."""
        known = self.seconds
        self._last.append(measured)
        if not self._is_rising or known is None or measured >= known:
            return _smoothed(known, _median(self._last))
        risen = max(measured, known / MAX_RISE)
        self._is_rising = risen > measured
        return risen

    def was_late(self) -> None:
        """Slow down the estimate of a node whose step was late."""
        if self.seconds is not None:
            self.seconds *= LATE_SLOWING


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A present or past worker.

    Attributes:
        name: name of the worker.
        speed: speed of its work.
        totals: totals of its work.
        is_here: whether it is a member of the run now.
        leases: unanswered leases by number, the oldest first; a worker with leases is awaited.
        sent_at: times when unanswered leases were sent, by the caller's clock.
        begun: time of its last answer.
        answered: numbers of its last answered leases.
        arriving: number of the lease whose contribution is arriving into memory; None for none.
        num_updates: its updates, for the bound of staleness.
        is_up_to_date: whether it has received everything; false at first.
        knows_the_end: whether it was sent that the run is over.
        slow_since: time when its link was found to be slow, so that it sends less; None if it was not.
    """

    name: str
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    is_here: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    sent_at: dict[int, float] = field(default_factory=dict)
    begun: float = -inf
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_ANSWERED))
    arriving: int | None = None
    num_updates: int = 0
    is_up_to_date: bool = False
    knows_the_end: bool = False
    slow_since: float | None = None

    def enter(self) -> None:
        """Mark the worker as present, without any state."""
        self.is_here, self.is_up_to_date, self.knows_the_end = True, False, False
        self.num_updates, self.arriving = 0, None
        self.begun = -inf
        self.leases.clear()
        self.sent_at.clear()
        self.answered.clear()

    def lease_sent(self, number: int, now: float) -> None:
        """Note the time when a lease was sent; a repetition changes nothing."""
        if number not in self.sent_at:
            self.sent_at[number] = now
            if len(self.sent_at) > _MAX_SENT_TIMES:
                del self.sent_at[next(iter(self.sent_at))]

    def seen(self, number: int, now: float) -> float | None:
        """Return the seconds since a lease was sent, or since the answer before; None: unknown."""
        sent = self.sent_at.pop(number, None)
        if sent is None:
            return None
        begun, self.begun = max(sent, self.begun), now
        return now - begun

    @property
    def oldest_lease(self) -> Lease | None:
        """The lease that it works on; None if it waits."""
        return next(iter(self.leases.values())) if self.leases else None


def seconds_of(estimates: Sequence[SpeedEstimate]) -> list[float]:
    """Return the believed seconds per sample of each node; unmeasured ones count as median."""
    reported, seen = list[float](), list[float]()
    for one in estimates:
        reported.append(_median_seconds(estimates) if one.seconds is None else one.seconds)
        if one.seen is not None:
            seen.append(one.seen)
    if len(seen) < 2:
        return reported
    usual = _upper_median(reported)
    scale = usual / (MAX_AHEAD * _upper_median(seen))
    for i, one in enumerate(estimates):
        if one.seen is not None and reported[i] < usual:
            reported[i] = max(reported[i], min(usual, scale * one.seen))
    return reported


def fixed_samples_of(estimates: Sequence[SpeedEstimate]) -> float:
    """Return the samples that cost as much as the fixed part of a step: of the task, so the lower median of all nodes.

    Of two nodes it is the smaller value: then none can claim that its own time is mostly fixed.
    """
    known = sorted(one.fixed_samples for one in estimates if one.fixed_samples is not None)
    return known[(len(known) - 1) // 2] if known else 0.0


def _median_seconds(estimates: Sequence[SpeedEstimate]) -> float:
    known = [one.seconds for one in estimates if one.seconds is not None]
    return _median(known) if known else 1.0


def _median(values: Collection[float]) -> float:
    """Return the median, without `statistics`, whose import would take 5 ms of a thin node's start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _upper_median(values: Sequence[float]) -> float:
    """Return the median, of two in the middle the slower one, so that one of two nodes cannot set it."""
    return sorted(values)[len(values) // 2]


def _smoothed(known: float | None, measured: float) -> float:
    """Return the estimate after another measurement."""
    return measured if known is None else known + NEWEST * (min(measured, MAX_SLOWDOWN * known) - known)
