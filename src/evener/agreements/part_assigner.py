"""Assigns work on fixed parts of the data: every worker has a part of its own, and uses all of it in each of its
rounds.

Federated averaging (McMahan et al., 2017): of K parts with n_k samples each, a round draws max(1, round(C K)) workers.
Each trains from the common weights on its own part, and the new weights are the mean of theirs, weighted by samples:

    w <- sum over the drawn of n_k w_k / sum over the drawn of n_k

No other worker gets the part of an absent one, which is missing in its rounds until it returns. A round is an epoch of
the drawn workers. The order of an epoch is that of the parts, one behind the other, each shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from random import Random

from evener.agreements.data_assigner import CursorState
from evener.agreements.messages import Lease, SampleRange
from evener.agreements.settings import AgreementSettings, Workload
from evener.agreements.worker_record import WorkerRecord


class PartAssigner:
    """The parts of a run, and the leases on them, with the interface of `DataAssigner`.

    Args:
        agreement: settings of the agreement, which set the fraction of the parts in a round.
        workload: parts by worker.
        first_number: number before the first lease.

    Attributes:
        number: number of the last lease.
        fixed_samples: 0, since batches are whole.
    """

    fixed_samples = 0.0

    def __init__(self, agreement: AgreementSettings, workload: Workload, first_number: int) -> None:
        sizes = [size for _, size in workload.parts]
        starts = accumulate(sizes, initial=0)
        self._parts = {name: (first, size) for (name, size), first in zip(workload.parts, starts, strict=False)}
        self._agreement, self._workload = agreement, workload
        self.number, self._round = first_number, 0

    @property
    def num_remaining(self) -> int:
        """Samples that the next round may use; 0 when all rounds were assigned."""
        is_over = self._workload.num_epochs is not None and self._round >= self._workload.num_epochs
        return 0 if is_over else self._workload.num_samples

    def use_measurements(self, workers: Iterable[WorkerRecord]) -> None:
        """Do nothing: all parts are of whole batches."""

    def give_back(self, samples: SampleRange) -> None:
        """Do nothing: no other worker has these samples, and the round continues without them."""

    def divide(self, version: int, workers: Sequence[WorkerRecord]) -> dict[str, Lease]:
        """Assign a round's work; return leases by worker, for workers that are drawn."""
        if not self.num_remaining:
            return {}
        drawn = self._drawn([worker.name for worker in workers if worker.name in self._parts])
        leases = {one.name: self._lease(version, one) for one in workers if one.name in drawn}
        self._round += bool(leases)
        return leases

    def lease_one(self, _version: int, _worker: WorkerRecord, _workers: Sequence[WorkerRecord]) -> Lease | None:
        """Return None: parts are assigned only in rounds (`Job` refuses agreements without rounds)."""
        return None

    def cursor_state(self, outstanding: Sequence[Lease]) -> CursorState:
        """Return the state of the rounds, as if those of the `outstanding` leases had not begun."""
        begun = min((lease.samples.epoch for lease in outstanding), default=self._round)
        return CursorState(num_samples=self._workload.num_samples, epoch=begun, position=0)

    def resume(self, state: CursorState) -> None:
        """Continue from the state of the rounds."""
        self._round = state.epoch

    def _drawn(self, present: Sequence[str]) -> set[str]:
        """Draw from the present workers with a part, in an order that depends on the seed and the round."""
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
