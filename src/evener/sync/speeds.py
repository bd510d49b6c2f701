"""How fast each worker is: its seconds a sample, first as benchmarked, then as measured, smoothed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from statistics import median

from evener.oracle.apportion import Worker

_NEWEST = 0.25
"""Weight of the newest measurement: one slow report moves a share by a quarter of what a slow worker would lose."""


class Speeds:
    """What is known about the speeds of all workers that ever were here."""

    def __init__(self) -> None:
        self._costs: dict[str, Worker] = {}
        self._measured: set[str] = set()

    @property
    def unit_seconds(self) -> dict[str, float]:
        """Seconds a sample, by worker."""
        return {worker: cost.unit_seconds for worker, cost in self._costs.items()}

    def expect(self, worker: str, cost: Worker) -> None:
        """Take the benchmark's `cost` of a worker's samples for true, as far as it has not been measured."""
        if worker in self._measured:
            cost = replace(cost, unit_seconds=self._costs[worker].unit_seconds)
        self._costs[worker] = cost

    def observe(self, worker: str, num_samples: int, seconds: float) -> None:
        """Learn that `worker` took `seconds` for `num_samples`; what cannot have been measured is not believed."""
        if num_samples > 0 and 0 < seconds < inf:
            measured = seconds / num_samples
            before = self._costs.get(worker) or Worker(unit_seconds=measured)
            smoothed = before.unit_seconds + _NEWEST * (measured - before.unit_seconds)
            self._costs[worker] = replace(before, unit_seconds=smoothed)
            self._measured.add(worker)

    def resume(self, unit_seconds: Mapping[str, float]) -> None:
        """Know what was measured before, as `unit_seconds` told."""
        self._costs = {worker: Worker(unit_seconds=seconds) for worker, seconds in unit_seconds.items()}
        self._measured = set(self._costs)

    def costs(self, workers: list[str]) -> list[Worker]:
        """What samples cost each of `workers`; who was never measured is taken for a middling one."""
        found = [self._costs.get(worker) for worker in workers]
        known = [cost for cost in found if cost is not None]
        if len(known) == len(found):
            return known
        usual = Worker(unit_seconds=median([cost.unit_seconds for cost in known]) if known else 1.0)
        return [cost or usual for cost in found]
