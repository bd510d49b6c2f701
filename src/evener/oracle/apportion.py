"""Divides whole units among unequal workers so that the last worker finishes as early as possible.

D'Hondt's rule gives each next unit to the worker that would finish it first. No other division into whole units
finishes earlier, because no unit can move to another worker without finishing later there. Largest-remainder rules lack
this property.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, inf

from evener.records.errors import DoesNotFit, require


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """The affine cost of a worker: n units take fixed_seconds + n * unit_seconds.

    Attributes:
        unit_seconds: seconds per unit.
        fixed_seconds: seconds that do not depend on the number of units.
        max_units: units that the worker can hold; None for no limit.
        min_units: units that the worker receives before any worker receives more, if there are enough. A worker that
            takes part in every step saves nothing by idling, and without units its speed can no longer be measured.
    """

    unit_seconds: float
    fixed_seconds: float = 0.0
    max_units: int | None = None
    min_units: int = 0

    def __post_init__(self) -> None:
        require(0 < self.unit_seconds < inf, "unit_seconds", self.unit_seconds, "positive and finite")
        require(0 <= self.fixed_seconds < inf, "fixed_seconds", self.fixed_seconds, "zero or more and finite")
        require(self.max_units is None or self.max_units >= 0, "max_units", self.max_units, "zero or more, or None")
        require(0 <= self.min_units <= self.capacity, "min_units", self.min_units, f"0 to {self.capacity}")

    def seconds(self, units: float) -> float:
        """Return the seconds for `units` units."""
        return self.fixed_seconds + units * self.unit_seconds

    @property
    def capacity(self) -> float:
        """The number of units that the worker can hold, infinity for no limit."""
        return inf if self.max_units is None else self.max_units


def apportion(total: int, workers: Sequence[NodeCost]) -> tuple[int, ...]:
    """Return the units of each worker, which sum to `total`, so that the slowest worker finishes as early as possible.

    Takes O(p log p) time for p workers, independent of `total`. Ties go to the earlier worker.

    Raises:
        DoesNotFit: the workers together cannot hold `total` units.
    """
    require(total >= 0, "total", total, "zero or more")
    require(bool(workers), "workers", workers, "at least one worker")
    capacity = sum(worker.capacity for worker in workers)
    if capacity < total:
        raise DoesNotFit(
            f"a micro-batch of {total} samples does not fit: all nodes' memory together holds {capacity:.0f} samples"
        )
    min_units = sum(worker.min_units for worker in workers)
    if 0 < min_units <= total:
        remaining = apportion(total - min_units, [_after_minimum(worker) for worker in workers])
        return tuple(n + worker.min_units for n, worker in zip(remaining, workers, strict=True))
    units = _below_level(total, workers)
    queue = [
        (worker.seconds(n + 1), i)
        for i, (worker, n) in enumerate(zip(workers, units, strict=True))
        if n < worker.capacity
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, i = heapq.heappop(queue)
        units[i] += 1
        if units[i] < workers[i].capacity:
            heapq.heappush(queue, (workers[i].seconds(units[i] + 1), i))
    return tuple(units)


def fewest_micro_batches(batch_size: int, max_samples: Sequence[int | None]) -> int:
    """Return the smallest power of two of micro-batches for which the replicas can hold a micro-batch.

    Args:
        batch_size: samples of a step over all replicas.
        max_samples: samples that each replica can hold at once; None for no limit.

    Raises:
        DoesNotFit: a replica cannot hold one sample.
    """
    if any(capacity == 0 for capacity in max_samples):
        raise DoesNotFit("a device's memory cannot hold one sample; leave that device out or use a smaller model")
    capacity = sum(inf if limit is None else limit for limit in max_samples)
    accumulate = 1
    while -(-batch_size // accumulate) > capacity:
        accumulate *= 2
    return accumulate


@lru_cache(maxsize=65536)
def by_shares(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return `total` units divided in proportion to `shares` by the same rule; divides filters, channels and rows.

    The rule gives each share at least its quota rounded down (Balinski & Young 1982); only the remainder is assigned
    unit by unit.
    """
    sum_of_shares = sum(shares)
    units = [int(total * share / sum_of_shares) for share in shares]
    queue = [((n + 1) / share, rank) for rank, (n, share) in enumerate(zip(units, shares, strict=True)) if share > 0]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, rank = queue[0]
        units[rank] += 1
        heapq.heapreplace(queue, ((units[rank] + 1) / shares[rank], rank))
    return tuple(units)


def weights_to_workers(weights: Sequence[float], max_units: Sequence[int | None]) -> list[NodeCost]:
    """Return workers whose speeds are `weights`, to divide by given shares; a weight of zero receives nothing."""
    return [
        NodeCost(unit_seconds=1 / weight if weight > 0 else 1.0, max_units=limit if weight > 0 else 0)
        for weight, limit in zip(weights, max_units, strict=True)
    ]


def local_steps(most: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the steps of each worker so that all finish together: `most` for the fastest, proportionally fewer for
    others.
    """
    fastest = min(seconds)
    return tuple([max(1, round(most * fastest / each)) for each in seconds])


def finish_seconds(shares: Sequence[int], workers: Sequence[NodeCost]) -> float:
    """Return the seconds until the last worker has done its share."""
    return max(worker.seconds(n) for worker, n in zip(workers, shares, strict=True))


def _after_minimum(worker: NodeCost) -> NodeCost:
    """Return the worker's cost for the units beyond its minimum."""
    max_units = None if worker.max_units is None else worker.max_units - worker.min_units
    return replace(worker, fixed_seconds=worker.seconds(worker.min_units), max_units=max_units, min_units=0)


def _below_level(total: int, workers: Sequence[NodeCost]) -> list[int]:
    """Return the units that surely finish before the common finishing time, so that only few remain to be assigned."""
    low, high = 0.0, 2 * (max(w.fixed_seconds for w in workers) + total * max(w.unit_seconds for w in workers))
    level = (total + sum(w.fixed_seconds / w.unit_seconds for w in workers)) / sum(1 / w.unit_seconds for w in workers)
    units = [0] * len(workers)
    while total - sum(units) > 2 * len(workers) and low < level < high:
        done = [_done_by(level, worker) for worker in workers]
        low, high, units = (level, high, done) if sum(done) <= total else (low, level, units)
        level = (low + high) / 2
    return [max(0, n - 1) for n in units]


def _done_by(level: float, worker: NodeCost) -> int:
    return int(min(worker.capacity, max(0, floor((level - worker.fixed_seconds) / worker.unit_seconds))))
