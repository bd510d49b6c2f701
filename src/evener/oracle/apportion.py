"""Divides whole units among unequal workers so that the last one finishes soonest, and anew when they change.

D'Hondt's rule: give each next unit to whoever would finish it soonest. No other division into whole units finishes
sooner, because a unit is moved nowhere without finishing there later. (Largest-remainder rules do not have this.)

Of nodes at work, a node's cost is its affine prediction times a factor, the median of measured / predicted over its
last steps: a median shrugs off a single slow step. The work is divided anew when that is predicted to shorten the step
by more than the few steps behind the prediction could promise by chance: a large gain is believed after 3 steps, a
small one after 16 whose spread is small beside it, the smallest after 24.

Where no prediction says what of a node's time is fixed, that is learnt from two different numbers of units. Of a small
model most of a step is fixed (launching operations, Python, hooks); a cost taken to be proportional then promises gains
from every unit that leaves the slower node, which never come, until that node has none.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, hypot, inf, sqrt
from statistics import median

from evener.errors import DoesNotFit, require


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What n units cost one worker: fixed_seconds + n * unit_seconds.

    Attributes:
        unit_seconds: for each unit.
        fixed_seconds: whatever the number of units.
        most: units that it can hold; None if nothing bounds it.
    """

    unit_seconds: float
    fixed_seconds: float = 0.0
    most: int | None = None

    def __post_init__(self) -> None:
        require(0 < self.unit_seconds < inf, "unit_seconds", self.unit_seconds, "positive and finite")
        require(0 <= self.fixed_seconds < inf, "fixed_seconds", self.fixed_seconds, "zero or more and finite")
        require(self.most is None or self.most >= 0, "most", self.most, "zero or more, or None")

    def seconds(self, units: int) -> float:
        """Seconds for `units` units."""
        return self.fixed_seconds + units * self.unit_seconds

    @property
    def room(self) -> float:
        """Units that it can hold, infinity if unbounded."""
        return inf if self.most is None else self.most


def apportion(total: int, workers: Sequence[Worker]) -> tuple[int, ...]:
    """Units for each worker, summing to `total`, such that the slowest finishes as soon as possible.

    Takes O(p log p) time whatever `total`. Ties go to the earlier worker.

    Raises:
        DoesNotFit: the workers together cannot hold `total` units.
    """
    require(total >= 0, "total", total, "zero or more")
    require(bool(workers), "workers", workers, "at least one worker")
    room = sum(worker.room for worker in workers)
    if room < total:
        raise DoesNotFit(f"{total} samples at once do not fit: the memory of all nodes together holds {room:.0f}")
    units = _below_level(total, workers)
    queue = [
        (worker.seconds(n + 1), i) for i, (worker, n) in enumerate(zip(workers, units, strict=True)) if n < worker.room
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, i = heapq.heappop(queue)
        units[i] += 1
        if units[i] < workers[i].room:
            heapq.heappush(queue, (workers[i].seconds(units[i] + 1), i))
    return tuple(units)


def fewest_micro_batches(batch_size: int, most: Sequence[int | None]) -> int:
    """As few micro-batches, 1, 2, 4 ..., as let replicas that hold `most` samples each (None: any) hold one.

    Raises:
        DoesNotFit: a replica cannot hold one sample.
    """
    if any(room == 0 for room in most):
        raise DoesNotFit("not even one sample fits the memory of one of the devices")
    room = sum(inf if one is None else one for one in most)
    accumulate = 1
    while -(-batch_size // accumulate) > room:
        accumulate *= 2
    return accumulate


@lru_cache(maxsize=65536)
def by_shares(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """`total` units in proportion to `shares`, by the same rule: what divides filters, channels and rows.

    The rule gives nobody less than its quota rounded down (Balinski & Young 1982); only what is left is handed out.
    """
    whole = sum(shares)
    units = [int(total * share / whole) for share in shares]
    queue = [((n + 1) / share, rank) for rank, (n, share) in enumerate(zip(units, shares, strict=True)) if share > 0]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, rank = queue[0]
        units[rank] += 1
        heapq.heapreplace(queue, ((units[rank] + 1) / shares[rank], rank))
    return tuple(units)


def weights_to_workers(weights: Sequence[float], most: Sequence[int | None]) -> list[Worker]:
    """Workers whose speeds are `weights`, to divide by given shares; a weight of zero gets nothing."""
    return [
        Worker(unit_seconds=1 / w if w > 0 else 1.0, most=m if w > 0 else 0) for w, m in zip(weights, most, strict=True)
    ]


def finish_seconds(shares: Sequence[int], workers: Sequence[Worker]) -> float:
    """Seconds until the last worker has done its share."""
    return max(worker.seconds(n) for worker, n in zip(workers, shares, strict=True))


def _below_level(total: int, workers: Sequence[Worker]) -> list[int]:
    """Most of the units, none of which the rule would place elsewhere: what is surely done before a common finish."""
    low, high = 0.0, 2 * (max(w.fixed_seconds for w in workers) + total * max(w.unit_seconds for w in workers))
    level = (total + sum(w.fixed_seconds / w.unit_seconds for w in workers)) / sum(1 / w.unit_seconds for w in workers)
    units = [0] * len(workers)
    while total - sum(units) > 2 * len(workers) and low < level < high:
        done = [_done_by(level, worker) for worker in workers]
        low, high, units = (level, high, done) if sum(done) <= total else (low, level, units)
        level = (low + high) / 2
    return [max(0, n - 1) for n in units]


def _done_by(level: float, worker: Worker) -> int:
    return int(min(worker.room, max(0, floor((level - worker.fixed_seconds) / worker.unit_seconds))))


CONFIDENCE: tuple[tuple[int, float], ...] = ((3, 0.35), (6, 0.15), (16, 0.05), (24, 0.02))
"""(steps behind a prediction, gain from which it is acted upon)."""

AT_FIRST: tuple[tuple[int, float], ...] = ((4, 0.04), (10, 0.015))
"""Likewise for the first decision: what a short trial promised is worth less than the first steps of the run itself."""

_REMEMBERED = 4
"""Divisions of which is remembered what they took."""
_LEAST_UNIT = 0.01
"""Of what a unit would cost if nothing were fixed: it costs that at least."""
_OTHER_SPEED = 0.1
"""By which the time of more units may be shorter by chance; beyond, the node is not what it was."""
_LEAST_ERROR = 0.06
"""Of one time: a median of few is no better known than that, however much alike they are."""
_CERTAIN = 16
"""Steps from which their spread is known well enough to be asked, too."""
_STANDARD_ERRORS = 3.0
"""Of the least certain node's speed: a gain within these may be noise."""


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """What to do now.

    Attributes:
        balance: to go on with.
        shares: of a full micro-batch from now on; None to leave them.
        gain: predicted seconds of a step before by after, minus one.
    """

    balance: Balance
    shares: tuple[int, ...] | None = None
    gain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What is known about the nodes' costs, and how the work is divided now.

    Attributes:
        workers: predicted cost of n samples, one a node.
        shares: of a full micro-batch, one a node.
        factors: the last measured / predicted seconds of every node, oldest first.
        is_tried: whether the first steps of the run have confirmed or corrected the trial's promise.
        is_learning: whether what is fixed in a node's cost is not predicted, but has to be learnt.
        earlier: of every node, (samples, seconds, steps that were timed) under the divisions before, oldest first.
    """

    workers: tuple[Worker, ...]
    shares: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    is_tried: bool = False
    is_learning: bool = False
    earlier: tuple[tuple[tuple[int, float, int], ...], ...] = ()

    def observe(self, samples: Sequence[int], seconds: Sequence[float]) -> Balance:
        """The balance after a step in which node i computed `samples[i]` in `seconds[i]`."""
        known = self.factors or ((),) * len(self.workers)
        factors = tuple(
            (*past, took / worker.seconds(n))[-CONFIDENCE[-1][0] :] if n and took > 0 else past
            for past, worker, n, took in zip(known, self.workers, samples, seconds, strict=True)
        )
        return replace(self, factors=factors)

    def decide(self) -> Rebalancing:
        """Divide anew if that is predicted to pay, by as many of the last steps as the gain needs to be believed."""
        decision = Rebalancing(balance=self)
        for steps, least_gain in CONFIDENCE if self.is_tried else AT_FIRST:
            if not self._has_seen(steps):
                break
            decision = self._divide(self._workers_now(steps), steps)
            noise = max(self._noise(steps), self._extrapolated(steps, decision.shares))
            if decision.shares is not None and decision.gain > max(least_gain, noise):
                return decision
        tried = self.is_tried or self._has_seen(AT_FIRST[-1][0])
        return Rebalancing(balance=replace(self, is_tried=tried), gain=decision.gain)

    def _has_seen(self, steps: int) -> bool:
        """Whether every node that has samples was timed in so many steps."""
        return bool(self.factors) and all(
            len(past) >= steps or n == 0 for past, n in zip(self.factors, self.shares, strict=True)
        )

    def _workers_now(self, steps: int) -> tuple[Worker, ...]:
        """The workers at their speed of the last `steps`."""
        now = tuple(
            _scaled(worker, median(past[-steps:]) if past else 1.0)
            for worker, past in zip(self.workers, self.factors, strict=True)
        )
        if not self.is_learning or not self.earlier:
            return now
        return tuple(_affine(worker, n, known) for worker, n, known in zip(now, self.shares, self.earlier, strict=True))

    def _noise(self, steps: int) -> float:
        """The gain that the spread of the last `steps` alone could promise; 0 where they are too few to know it."""
        if steps < _CERTAIN:
            return 0.0
        return _STANDARD_ERRORS * max(_standard_error(past[-steps:]) for past in self.factors if past)

    def _divide(self, workers: tuple[Worker, ...], steps: int) -> Rebalancing:
        shares = apportion(sum(self.shares), workers)
        gain = finish_seconds(self.shares, workers) / finish_seconds(shares, workers) - 1
        known = self.earlier or ((),) * len(workers)
        earlier = tuple(
            (*past, (n, worker.seconds(n), steps))[-_REMEMBERED:] if n else past
            for past, n, worker in zip(known, self.shares, workers, strict=True)
        )
        earlier = earlier if self.is_learning else ()
        balance = replace(self, workers=workers, shares=shares, factors=(), is_tried=True, earlier=earlier)
        return Rebalancing(balance=balance, shares=shares if shares != self.shares else None, gain=gain)

    def _extrapolated(self, steps: int, shares: Sequence[int] | None) -> float:
        """The gain that the spread of the times behind a learnt fixed cost could promise, so far from those tried."""
        if not self.earlier or shares is None:
            return 0.0
        found = [0.0]
        for n, new, known, past in zip(self.shares, shares, self.earlier, self.factors, strict=True):
            if past and (other := _farthest(n, known)) is not None:
                now = max(_LEAST_ERROR / sqrt(steps), _standard_error(past[-steps:]))
                error = hypot(now, _LEAST_ERROR / sqrt(other[2]))
                found.append(_STANDARD_ERRORS * error * abs(new - n) / abs(other[0] - n))
        return max(found)


def _standard_error(values: Sequence[float]) -> float:
    """Of the median of `values`, relative to it; from their median deviation, as if they were normally distributed."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / (sqrt(len(values)) * middle)


def _scaled(worker: Worker, factor: float) -> Worker:
    return replace(worker, unit_seconds=worker.unit_seconds * factor, fixed_seconds=worker.fixed_seconds * factor)


def _farthest(units: int, earlier: Sequence[tuple[int, float, int]]) -> tuple[int, float, int] | None:
    """Of what is known from earlier, that of the most different number of units; None if all are the same."""
    known = [one for one in earlier if one[0] != units]
    return max(known, key=lambda one: abs(one[0] - units), default=None)


def _affine(worker: Worker, units: int, earlier: Sequence[tuple[int, float, int]]) -> Worker:
    """`worker`, right about `units`, with the fixed part that another number of them tells."""
    other = _farthest(units, earlier)
    if not units or other is None:
        return worker
    seconds = worker.seconds(units)
    slope, most = (seconds - other[1]) / (units - other[0]), seconds / units
    if slope < 0 and abs(seconds - other[1]) > _OTHER_SPEED * seconds:
        return worker
    unit = min(max(slope, _LEAST_UNIT * most), most)
    return replace(worker, unit_seconds=unit, fixed_seconds=max(0.0, seconds - units * unit))
