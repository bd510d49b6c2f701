"""Divides whole units among unequal workers so that the last one finishes as soon as possible.

D'Hondt's rule: give each next unit to whoever would finish it soonest. No other division into whole units finishes
sooner, because a unit is moved nowhere without finishing there later. (Largest-remainder rules do not have this.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

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
    low, high = 0.0, max(w.fixed_seconds for w in workers) + total * max(w.unit_seconds for w in workers)
    for _ in range(64):
        level = (low + high) / 2
        low, high = (level, high) if sum(_done_by(level, w) for w in workers) <= total else (low, level)
    return [max(0, _done_by(low, worker) - 1) for worker in workers]


def _done_by(level: float, worker: Worker) -> int:
    return int(min(worker.room, max(0, floor((level - worker.fixed_seconds) / worker.unit_seconds))))
