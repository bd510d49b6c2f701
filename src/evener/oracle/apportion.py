"""Divides whole units among unequal workers so that the last one finishes soonest.

D'Hondt's rule: give each next unit to whoever would finish it soonest. No other division into whole units finishes
sooner, because a unit is moved nowhere without finishing there later. (Largest-remainder rules do not have this.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, inf

from evener.records.errors import DoesNotFit, require


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What n units cost one worker: fixed_seconds + n * unit_seconds.

    Attributes:
        unit_seconds: for each unit.
        fixed_seconds: whatever the number of units.
        most: units that it can hold; None if nothing bounds it.
        least: units that it is given before anybody has more, where there are so many: who takes part in every step
            anyhow saves nothing without them, and nobody would see any more what it is worth.
    """

    unit_seconds: float
    fixed_seconds: float = 0.0
    most: int | None = None
    least: int = 0

    def __post_init__(self) -> None:
        require(0 < self.unit_seconds < inf, "unit_seconds", self.unit_seconds, "positive and finite")
        require(0 <= self.fixed_seconds < inf, "fixed_seconds", self.fixed_seconds, "zero or more and finite")
        require(self.most is None or self.most >= 0, "most", self.most, "zero or more, or None")
        require(0 <= self.least <= self.room, "least", self.least, "zero or more, and at most what it can hold")

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
    least = sum(worker.least for worker in workers)
    if 0 < least <= total:
        rest = apportion(total - least, [_after_least(worker) for worker in workers])
        return tuple(n + worker.least for n, worker in zip(rest, workers, strict=True))
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


def _after_least(worker: Worker) -> Worker:
    """What units beyond its least cost a worker."""
    most = None if worker.most is None else worker.most - worker.least
    return replace(worker, fixed_seconds=worker.seconds(worker.least), most=most, least=0)


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
