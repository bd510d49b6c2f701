"""Assigns samples to workers, each once per epoch, while workers join and leave.

A cursor walks the order of every epoch, a function of seed and epoch that all nodes compute alike; only positions in it
are sent. An assigned position is either used, or returned and assigned again before new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from evener.agreements.messages import Lease, SampleRange
from evener.agreements.settings import AgreementSettings, Workload
from evener.agreements.worker_record import WorkerRecord, fixed_samples_of, seconds_of
from evener.oracle.apportion import NodeCost, apportion, local_steps
from evener.records.errors import require
from evener.records.schema import Part

_MIN_SAVING = 0.05
"""Share of a round's time that a new division has to save."""

_MIN_AGE = 8
"""Rounds for which a division is kept at least, while the workers stay."""

TRIAL_ROUNDS = 50
"""Rounds after which a worker without samples gets one: otherwise the server would not notice that it is fast again."""

_TRIAL_COST = 0.05
"""Largest share of the time for the trials of one worker, so a slower worker has fewer trials."""


class CursorState(Part, frozen=True, kw_only=True):
    """State of a cursor.

    Attributes:
        num_samples: samples in the data set.
        epoch: epoch of the cursor.
        position: number of assigned samples in its epoch.
        returned: (epoch, first, count) of returned samples.
    """

    num_samples: int
    epoch: int
    position: int
    returned: tuple[tuple[int, int, int], ...] = ()


class SampleCursor:
    """The samples of one data set, epoch after epoch.

    Args:
        num_samples: samples in the data set.
        num_epochs: number of epochs; None: unlimited.
    """

    def __init__(self, num_samples: int, num_epochs: int | None) -> None:
        require(num_samples > 0, "num_samples", num_samples, "positive")
        require(num_epochs is None or num_epochs > 0, "num_epochs", num_epochs, "positive, or None")
        self.num_samples, self._num_epochs = num_samples, num_epochs
        self._returned: list[tuple[int, int, int]] = []
        self._epoch, self._position = 0, 0

    @property
    def num_remaining(self) -> int:
        """Remaining samples of the oldest unfinished epoch; 0 when all epochs are assigned."""
        if self._returned:
            epoch = self._returned[0][0]
            returned = sum([count for e, _, count in self._returned if e == epoch])
            return returned + (self._fresh() if epoch == self._epoch else 0)
        return self._fresh()

    def take(self, most: int) -> SampleRange | None:
        """Return at most `most` samples of the oldest unfinished epoch; None if there are none."""
        ranges: list[tuple[int, int]] = []
        epoch = self._returned[0][0] if self._returned else self._epoch
        while most > 0 and self._returned and self._returned[0][0] == epoch:
            _, first, count = self._returned.pop(0)
            if count > most:
                self._returned.insert(0, (epoch, first + most, count - most))
                count = most
            ranges.append((first, count))
            most -= count
        count = min(most, self._fresh()) if epoch == self._epoch else 0
        if count > 0:
            ranges.append((self._position, count))
            self._position += count
            if self._position == self.num_samples:
                self._epoch, self._position = self._epoch + 1, 0
        return SampleRange(epoch=epoch, ranges=tuple(ranges)) if ranges else None

    def give_back(self, samples: SampleRange) -> None:
        """Return `samples` to be assigned again, before new ones."""
        self._returned += [(samples.epoch, first, count) for first, count in samples.ranges]
        self._returned.sort()

    def state(self) -> CursorState:
        """Return the state of the cursor."""
        return CursorState(
            num_samples=self.num_samples, epoch=self._epoch, position=self._position, returned=tuple(self._returned)
        )

    @classmethod
    def resume(cls, state: CursorState, num_epochs: int | None) -> SampleCursor:
        """Return a cursor with this state."""
        cursor = cls(state.num_samples, num_epochs)
        cursor._epoch, cursor._position, cursor._returned = state.epoch, state.position, list(state.returned)
        return cursor

    def _fresh(self) -> int:
        """Return the number of samples of the cursor's epoch that were never assigned."""
        is_over = self._num_epochs is not None and self._epoch >= self._num_epochs
        return 0 if is_over else self.num_samples - self._position


class DataAssigner:
    """The samples of a run, and the leases on them.

    Args:
        agreement: settings of the agreement, which set the size of a lease.
        workload: workload of the run.
        first_number: number before the first lease.

    Attributes:
        cursor: cursor in the samples.
        number: number of the last lease.
        fixed_samples: samples that cost as much as the fixed part of a step; 0 unless batches are divided.
    """

    def __init__(self, agreement: AgreementSettings, workload: Workload, first_number: int) -> None:
        self._agreement, self._num_epochs = agreement, workload.num_epochs
        self.cursor = SampleCursor(workload.num_samples, workload.num_epochs)
        self.number = first_number
        self.fixed_samples = 0.0
        self._is_one_batch = is_one_batch(agreement)
        self._division = CachedDivision()

    @property
    def num_remaining(self) -> int:
        """Remaining samples of the oldest unfinished epoch; 0 when all epochs are assigned."""
        return self.cursor.num_remaining

    def use_measurements(self, workers: Iterable[WorkerRecord]) -> None:
        """Take the fixed part of a step from the measurements of the workers."""
        if self._is_one_batch:
            self.fixed_samples = fixed_samples_of([worker.speed for worker in workers])

    def give_back(self, samples: SampleRange) -> None:
        """Return `samples` to be assigned again, before new ones."""
        self.cursor.give_back(samples)

    def divide(self, version: int, workers: Sequence[WorkerRecord]) -> dict[str, Lease]:
        """Assign a round's work; return leases by worker, for workers that get any."""
        seconds, remaining = self._seconds(workers), self.cursor.num_remaining
        wanted = wanted_samples(self._agreement, seconds, remaining)
        if sum(wanted) == 0:
            return {}
        if self._is_one_batch:
            names, total = [worker.name for worker in workers], min(self._agreement.batch, remaining)
            shares = self._division.divide(total, wanted, seconds, names, self.fixed_samples)
        else:
            shares = divide(remaining, wanted, seconds)
        return {worker.name: self._lease(version, worker, n) for worker, n in zip(workers, shares, strict=True) if n}

    def lease_one(self, version: int, worker: WorkerRecord, workers: Sequence[WorkerRecord]) -> Lease | None:
        """Assign work to `worker` alone, according to its speed among `workers`; None if no samples remain."""
        wanted = wanted_samples(self._agreement, self._seconds(workers), self.cursor.num_remaining)
        share = wanted[workers.index(worker)]
        return self._lease(version, worker, share) if share else None

    def cursor_state(self, outstanding: Sequence[Lease]) -> CursorState:
        """Return the state of the cursor, as if the `outstanding` leases had been returned."""
        copy = SampleCursor.resume(self.cursor.state(), self._num_epochs)
        for lease in outstanding:
            copy.give_back(lease.samples)
        return copy.state()

    def resume(self, state: CursorState) -> None:
        """Continue from the state of a cursor."""
        self.cursor = SampleCursor.resume(state, self._num_epochs)

    def _seconds(self, workers: Sequence[WorkerRecord]) -> list[float]:
        """Return the seconds per sample of each worker; equal ones if the division is fixed."""
        if self._agreement.division == "fixed":
            return [1.0] * len(workers)
        return seconds_of([worker.speed for worker in workers])

    def _lease(self, version: int, worker: WorkerRecord, num_samples: int) -> Lease:
        samples = self.cursor.take(num_samples)
        assert samples is not None, "shares are limited to the remaining samples"
        self.number += 1
        steps = 1 if self._agreement.local_steps == 1 else ceil(num_samples / self._agreement.batch)
        lease = Lease(number=self.number, version=version, samples=samples, num_steps=steps)
        worker.leases[lease.number] = lease
        return lease


def wanted_samples(agreement: AgreementSettings, seconds: Sequence[float], remaining: int) -> tuple[int, ...]:
    """Return the samples that each worker may use in a round.

    Args:
        agreement: settings of the agreement, which set the number of steps and their batch.
        seconds: seconds per sample of each worker; equal ones if the division is fixed.
        remaining: samples that can be assigned now.
    """
    if agreement.local_steps == "epoch":
        return (remaining,) * len(seconds)
    if agreement.local_steps == 1:
        return (min(agreement.batch, remaining),) * len(seconds)
    steps = local_steps(agreement.local_steps, seconds)
    return tuple([min(n * agreement.batch, remaining) for n in steps])


def is_one_batch(agreement: AgreementSettings) -> bool:
    """Return whether all workers of a round share the samples of one batch."""
    return agreement.local_steps == 1 and agreement.staleness == 0 and agreement.division == "speed"


def full_samples(num_samples: int, num_steps: int, fixed: float, batch: int) -> float:
    """Return the samples of full batches that take as long as steps of fewer samples.

    A step of n samples takes s (fixed + n) seconds, where s belongs to the worker. Without the fixed part, a worker
    with few samples would look slow and get fewer still, until one worker has them all.
    """
    return (num_steps * fixed + num_samples) * batch / (fixed + batch)


def divide(total: int, wanted: Sequence[int], seconds: Sequence[float], fixed: float = 0.0) -> tuple[int, ...]:
    """Divide at most `total` samples, within each worker's `wanted`, so that the last worker finishes as soon as
    possible.

    Args:
        total: samples to divide.
        wanted: samples that each worker may use.
        seconds: relative seconds per sample of each worker.
        fixed: samples that cost as much as the fixed part of a step.
    """
    if sum(wanted) <= total:
        return tuple(wanted)
    costs = [
        NodeCost(unit_seconds=each, fixed_seconds=fixed * each, max_units=most)
        for each, most in zip(seconds, wanted, strict=True)
    ]
    return apportion(total, costs)


def with_trials(
    shares: Sequence[int], wanted: Sequence[int], seconds: Sequence[float], idle: Sequence[int], fixed: float = 0.0
) -> tuple[int, ...]:
    """Return `shares` in which each worker that is due for a trial gets one sample, taken from the largest share.

    Args:
        shares: samples of each worker.
        wanted: samples that each could use.
        seconds: seconds per sample of each worker.
        idle: rounds in a row without samples, of each worker.
        fixed: samples that cost as much as the fixed part of a step.
    """
    finish, result = _finish_seconds(shares, seconds, fixed), list(shares)
    donors = [i for i, n in enumerate(shares) if n]
    for i, (rounds, most, each) in enumerate(zip(idle, wanted, seconds, strict=True)):
        is_due = rounds >= max(TRIAL_ROUNDS, (fixed + 1) * each / (_TRIAL_COST * finish))
        donor = max(donors, key=result.__getitem__)
        if is_due and most and not shares[i] and result[donor]:
            result[donor], result[i] = result[donor] - 1, 1
    return tuple(result)


@dataclass
class CachedDivision:
    """The last division of a batch, kept while no other would save much: dividing takes longer than a small round."""

    _key: tuple[object, ...] = ()
    _shares: tuple[int, ...] = ()
    _age: int = 0
    _idle: dict[str, int] = field(default_factory=dict)

    def divide(
        self,
        total: int,
        wanted: Sequence[int],
        seconds: Sequence[float],
        workers: Sequence[str],
        fixed: float = 0.0,
    ) -> tuple[int, ...]:
        """Return `divide` of this module, or the last division of as many samples to the same workers; both with
        trials.
        """
        key, self._age = (total, *wanted, *workers), self._age + 1
        if key != self._key or (self._age > _MIN_AGE and not _is_near_best(self._shares, total, seconds, fixed)):
            self._key, self._shares, self._age = key, divide(total, wanted, seconds, fixed), 0
        if 0 in self._shares:
            return self._add_trials(wanted, seconds, workers, fixed)
        self._idle.clear()
        return self._shares

    def _add_trials(
        self, wanted: Sequence[int], seconds: Sequence[float], workers: Sequence[str], fixed: float
    ) -> tuple[int, ...]:
        idle = [self._idle.get(worker, 0) for worker in workers]
        shares = with_trials(self._shares, wanted, seconds, idle, fixed)
        self._idle = {name: 0 if n else k + 1 for name, n, k in zip(workers, shares, idle, strict=True)}
        return shares


def _finish_seconds(shares: Sequence[int], seconds: Sequence[float], fixed: float) -> float:
    """Return the seconds until the last worker is done."""
    return max([(fixed + n) * each if n else 0.0 for each, n in zip(seconds, shares, strict=True)])


def _is_near_best(shares: Sequence[int], total: int, seconds: Sequence[float], fixed: float) -> bool:
    """Return whether even a division into fractions would save too little."""
    ideal, samples, rate = inf, float(total), 0.0
    for each in sorted(seconds):  # with a fixed part, the fastest workers alone may be the best
        samples, rate = samples + fixed, rate + 1 / each
        ideal = min(ideal, samples / rate)
    return _finish_seconds(shares, seconds, fixed) <= (1 + _MIN_SAVING) * ideal + max(seconds)
