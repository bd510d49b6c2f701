"""Gives out work: which samples go to whom, each once an epoch, whoever comes or goes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from evener.oracle.apportion import Worker
from evener.sync.messages import Lease
from evener.sync.protocol import SyncProtocol, Workload
from evener.sync.samples import CursorState, SampleCursor
from evener.sync.shares import KeptDivision, divide, is_one_batch, wanted_samples
from evener.sync.speed_estimator import costs_of
from evener.sync.worker_record import WorkerRecord

_EVEN = Worker(unit_seconds=1.0)


class DataAssigner:
    """The samples of a run, and the leases on them.

    Args:
        agreement: how much goes into a lease.
        workload: the samples.
        first_number: of the leases.

    Attributes:
        cursor: in the samples.
        number: of the last lease.
    """

    def __init__(self, agreement: SyncProtocol, workload: Workload, first_number: int) -> None:
        self._agreement, self._num_epochs = agreement, workload.num_epochs
        self.cursor = SampleCursor(workload.num_samples, workload.num_epochs)
        self.number = first_number
        self._is_one_batch = is_one_batch(agreement)
        self._division = KeptDivision()

    def divide(self, version: int, workers: Sequence[WorkerRecord]) -> dict[str, Lease]:
        """A round's work: leases by worker, of those that get any, who have them from now on."""
        costs, left = self._costs(workers), self.cursor.left
        wanted = wanted_samples(self._agreement, costs, left)
        if sum(wanted) == 0:
            return {}
        if self._is_one_batch:
            names = [worker.name for worker in workers]
            shares = self._division.divide(min(self._agreement.batch, left), wanted, costs, names)
        else:
            shares = divide(left, wanted, costs)
        return {worker.name: self._lease(version, worker, n) for worker, n in zip(workers, shares, strict=True) if n}

    def lease_one(self, version: int, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Lease | None:
        """Work for `worker` alone, as much as its speed among `workers` calls for; None if nothing is left."""
        wanted = wanted_samples(self._agreement, self._costs(workers), self.cursor.left)
        share = wanted[workers.index(worker)]
        return self._lease(version, worker, share) if share else None

    def stock(self, outstanding: Sequence[Lease]) -> CursorState:
        """What is left of the samples, as if the `outstanding` leases had been taken back."""
        copy = SampleCursor.resume(self.cursor.state(), self._num_epochs)
        for lease in outstanding:
            copy.give_back(lease.samples)
        return copy.state()

    def resume(self, stock: CursorState) -> None:
        """Go on with what was left."""
        self.cursor = SampleCursor.resume(stock, self._num_epochs)

    def _costs(self, workers: Sequence[WorkerRecord]) -> list[Worker]:
        if self._agreement.division == "fixed":
            return [_EVEN] * len(workers)
        return costs_of([worker.speed for worker in workers])

    def _lease(self, version: int, worker: WorkerRecord, num_samples: int) -> Lease:
        samples = self.cursor.take(num_samples)
        assert samples is not None, "shares are cut to what is left"
        self.number += 1
        steps = 1 if self._agreement.local_steps == 1 else ceil(num_samples / self._agreement.batch)
        lease = Lease(number=self.number, version=version, samples=samples, num_steps=steps)
        worker.leases[lease.number] = lease
        return lease
