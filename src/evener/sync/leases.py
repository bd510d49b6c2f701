"""Gives out work: which samples go to whom, each once an epoch, whoever comes or goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from evener.errors import require
from evener.oracle.apportion import Worker
from evener.schema import Part
from evener.sync.agreement import Agreement
from evener.sync.messages import Lease
from evener.sync.samples import CursorState, SampleCursor, SampleRange
from evener.sync.shares import Division, divide, is_one_batch, wanted_samples
from evener.sync.speeds import Speeds
from evener.sync.workload import Workload

SHARED = ""
"""Name of the supply that all workers take from."""

_EVEN = Worker(unit_seconds=1.0)


class Stock(Part, frozen=True, kw_only=True):
    """What is left of the samples of one supply, of `num_samples` in all."""

    num_samples: int
    mark: CursorState


class Leasing:
    """The samples of a run, and the leases on them.

    Args:
        agreement: how much goes into a lease.
        workload: the samples.
        speeds: of the workers; who is faster gets more.
        first_number: of the leases.
    """

    def __init__(self, agreement: Agreement, workload: Workload, speeds: Speeds, first_number: int) -> None:
        self._agreement, self._workload, self._speeds = agreement, workload, speeds
        self.number = first_number
        """Of the last lease."""
        self._division = Division()
        self._supplies: dict[str, SampleCursor] = {}
        if workload.num_samples is not None:
            self._supplies[SHARED] = SampleCursor(workload.num_samples, workload.num_epochs)

    def join(self, worker: str, num_samples: int | None) -> None:
        """Know `worker`, and the number of samples that it alone has, if data stays where it is.

        Raises:
            InvalidValue: data stays where it is and no number is given, or another than before.
        """
        if SHARED in self._supplies:
            return
        require(num_samples is not None, f"num_samples of {worker}", num_samples, "given, since data stays on its node")
        assert num_samples is not None
        supply = self._supplies.setdefault(worker, SampleCursor(num_samples, self._workload.num_epochs))
        require(supply.num_samples == num_samples, f"num_samples of {worker}", num_samples, f"{supply.num_samples}")

    def left(self, worker: str) -> int:
        """Samples that `worker` could take now."""
        return self._supply(worker).left

    def is_spent(self, workers: Sequence[str]) -> bool:
        """Whether nothing is left to give out to any of `workers`; never while data is still to come with a worker."""
        if SHARED in self._supplies:
            return self._supplies[SHARED].left == 0
        return bool(workers) and not any(self._left(workers))

    def divide(self, version: int, workers: list[str]) -> dict[str, Lease]:
        """A round's work: leases by worker, of those that get any."""
        costs, left = self._costs(workers), self._left(workers)
        wanted = wanted_samples(self._agreement, costs, left)
        if sum(wanted) == 0:
            return {}
        if is_one_batch(self._agreement):
            total = min(self._agreement.batch, self._most(left))
            shares = self._division.divide(total, wanted, costs, workers)
        else:
            shares = divide(self._most(left), wanted, costs)
        return {worker: self._lease(version, worker, n) for worker, n in zip(workers, shares, strict=True) if n}

    def lease_one(self, version: int, worker: str, workers: list[str]) -> Lease | None:
        """Work for `worker` alone, as much as its speed among `workers` calls for; None if nothing is left for it."""
        costs, left = self._costs(workers), self.left(worker)
        share = wanted_samples(self._agreement, costs, [left] * len(workers))[workers.index(worker)]
        return self._lease(version, worker, share) if share else None

    def take_back(self, worker: str, lease: Lease) -> None:
        """Have the samples of `lease` given out again."""
        self._supply(worker).give_back(lease.samples)

    def stocks(self, outstanding: Sequence[tuple[str, Lease]]) -> dict[str, Stock]:
        """What is left of every supply, as if the `outstanding` leases had been taken back from their workers."""
        copies = {
            name: _supply(supply.num_samples, self._workload, supply.mark()) for name, supply in self._supplies.items()
        }
        for worker, lease in outstanding:
            copies[self._key(worker)].give_back(lease.samples)
        return {name: Stock(num_samples=copy.num_samples, mark=copy.mark()) for name, copy in copies.items()}

    def resume(self, stocks: Mapping[str, Stock]) -> None:
        """Go on with what was left."""
        for name, stock in stocks.items():
            self._supplies[name] = _supply(stock.num_samples, self._workload, stock.mark)

    def _costs(self, workers: list[str]) -> list[Worker]:
        is_fixed = self._agreement.division == "fixed"
        return [_EVEN] * len(workers) if is_fixed else self._speeds.costs(workers)

    def _key(self, worker: str) -> str:
        return SHARED if SHARED in self._supplies else worker

    def _supply(self, worker: str) -> SampleCursor:
        return self._supplies[self._key(worker)]

    def _left(self, workers: Sequence[str]) -> list[int]:
        """Samples that each of `workers` could take now."""
        if (shared := self._supplies.get(SHARED)) is not None:
            return [shared.left] * len(workers)
        return [self.left(worker) for worker in workers]

    def _most(self, left: Sequence[int]) -> int:
        """Samples that a round could use up."""
        return left[0] if SHARED in self._supplies else sum(left)

    def _lease(self, version: int, worker: str, num_samples: int) -> Lease:
        portion = self._supply(worker).take(num_samples)
        assert isinstance(portion, SampleRange)
        assert portion.num_samples == num_samples, "shares are cut to what is left"
        self.number += 1
        steps = 1 if self._agreement.local_steps == 1 else ceil(num_samples / self._agreement.batch)
        return Lease(number=self.number, version=version, samples=portion, num_steps=steps)


def _supply(num_samples: int, workload: Workload, mark: CursorState) -> SampleCursor:
    supply = SampleCursor(num_samples, workload.num_epochs)
    supply.resume(mark)
    return supply
