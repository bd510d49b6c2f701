"""Gives out work on data that stay: every worker has a part of its own, and uses all of it in each of its rounds.

Federated averaging (McMahan et al., 2017): of K parts with n_k samples each, a round draws max(1, round(C K)) workers,
each goes from the common weights over its own part, and the weights are the mean of theirs, weighted by samples:

    w <- sum over the drawn of n_k w_k / sum over the drawn of n_k

A part goes to nobody else: who is gone is missing in his rounds, and has his part when he comes back. A round is an
epoch of those that are drawn. The order of an epoch is that of the parts, one behind the other, each shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from random import Random

from evener.sync.data_assigner import CursorState
from evener.sync.messages import Lease, SampleRange
from evener.sync.protocol import SyncProtocol, Workload
from evener.sync.worker_record import WorkerRecord


class PartAssigner:
    """The parts of a run, and the leases on them; to the server it is what `DataAssigner` is.

    Args:
        agreement: says which fraction of the parts a round draws.
        workload: the parts, by worker.
        first_number: of the leases.

    Attributes:
        number: of the last lease.
    """

    def __init__(self, agreement: SyncProtocol, workload: Workload, first_number: int) -> None:
        sizes = [size for _, size in workload.parts]
        starts = accumulate(sizes, initial=0)
        self._parts = {name: (first, size) for (name, size), first in zip(workload.parts, starts, strict=False)}
        self._agreement, self._workload = agreement, workload
        self.number, self._round = first_number, 0

    @property
    def left(self) -> int:
        """Samples that the next round may use; 0 when all rounds were given out."""
        is_over = self._workload.num_epochs is not None and self._round >= self._workload.num_epochs
        return 0 if is_over else self._workload.num_samples

    def give_back(self, samples: SampleRange) -> None:
        """Nobody else has these samples: the round goes on without them."""

    def divide(self, version: int, workers: Sequence[WorkerRecord]) -> dict[str, Lease]:
        """A round's work: leases by worker, of those that are drawn, who have them from now on."""
        if not self.left:
            return {}
        drawn = self._drawn([worker.name for worker in workers if worker.name in self._parts])
        leases = {one.name: self._lease(version, one) for one in workers if one.name in drawn}
        self._round += bool(leases)
        return leases

    def lease_one(self, _version: int, _worker: WorkerRecord, _workers: Sequence[WorkerRecord]) -> Lease | None:
        """Parts are given out in rounds alone: there is none (`Job` refuses what has no rounds)."""
        return None

    def stock(self, outstanding: Sequence[Lease]) -> CursorState:
        """Where the rounds stand, as if those of the `outstanding` leases had not been begun."""
        begun = min((lease.samples.epoch for lease in outstanding), default=self._round)
        return CursorState(num_samples=self._workload.num_samples, epoch=begun, position=0)

    def resume(self, stock: CursorState) -> None:
        """Go on with the rounds that were left."""
        self._round = stock.epoch

    def _drawn(self, present: Sequence[str]) -> set[str]:
        """Of the workers with a part that are here, in an order that the seed and the round decide."""
        most = max(1, round(self._agreement.fraction * len(self._parts)))
        draw = Random(f"{self._workload.seed}/{self._round}")
        order = sorted(self._parts)
        draw.shuffle(order)
        return set([name for name in order if name in present][:most])

    def _lease(self, version: int, worker: WorkerRecord) -> Lease:
        first, size = self._parts[worker.name]
        self.number += 1
        samples = SampleRange(epoch=self._round, ranges=((first, size),))
        steps = ceil(size / self._agreement.batch)
        lease = Lease(number=self.number, version=version, samples=samples, num_steps=steps)
        worker.leases[lease.number] = lease
        return lease
