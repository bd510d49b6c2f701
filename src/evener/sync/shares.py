"""How many samples each worker of a round gets: a pure function of their speeds, and one that spares it mostly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evener.oracle.apportion import Worker, apportion
from evener.sync.protocol import SyncProtocol

_WORTH = 0.05
"""Part of a round's seconds that a new division has to save."""

_LEAST_AGE = 8
"""Rounds that a division is kept at least, while the workers stay."""

TRIAL_ROUNDS = 50
"""Rounds after which a worker that gets nothing gets one sample: else nobody would notice that it is fast again."""

_TRIAL_COST = 0.05
"""Part of the time that such trials of one worker may cost at most: the slower it is, the rarer they are."""


def local_steps(most: int, costs: Sequence[Worker]) -> tuple[int, ...]:
    """Steps of each worker so that all finish together: the fastest `most`, who is half as fast half, at least one."""
    fastest = min(cost.unit_seconds for cost in costs)
    return tuple(max(1, round(most * fastest / cost.unit_seconds)) for cost in costs)


def wanted_samples(agreement: SyncProtocol, costs: Sequence[Worker], left: int) -> tuple[int, ...]:
    """The samples that each worker may use in a round.

    Args:
        agreement: says how many steps, and of what batch.
        costs: of the workers' samples; equal ones if the division is fixed.
        left: samples that can be taken now.
    """
    if agreement.local_steps == "epoch":
        return (left,) * len(costs)
    if agreement.local_steps == 1:
        return (min(agreement.batch, left),) * len(costs)
    steps = local_steps(agreement.local_steps, costs)
    return tuple([min(n * agreement.batch, left) for n in steps])


def is_one_batch(agreement: SyncProtocol) -> bool:
    """Whether all workers of a round share the samples of one batch."""
    return agreement.local_steps == 1 and agreement.staleness == 0 and agreement.division == "speed"


def divide(total: int, wanted: Sequence[int], costs: Sequence[Worker]) -> tuple[int, ...]:
    """At most `total` samples, nobody more than it wanted, so that the last finishes as soon as possible."""
    if sum(wanted) <= total:
        return tuple(wanted)
    return apportion(total, [replace(cost, most=most) for cost, most in zip(costs, wanted, strict=True)])


def with_trials(
    shares: Sequence[int], wanted: Sequence[int], costs: Sequence[Worker], idle: Sequence[int]
) -> tuple[int, ...]:
    """`shares`, of which each worker that is due for a trial gets one sample, taken from whoever has most.

    Args:
        shares: samples of each worker.
        wanted: samples that each could use.
        costs: of the workers' samples.
        idle: rounds in a row for which each has got nothing.
    """
    seconds, result = _finish_seconds(shares, costs), list(shares)
    givers = [i for i, n in enumerate(shares) if n]
    for i, (rounds, most, cost) in enumerate(zip(idle, wanted, costs, strict=True)):
        is_due = rounds >= max(TRIAL_ROUNDS, cost.seconds(1) / (_TRIAL_COST * seconds))
        giver = max(givers, key=result.__getitem__)
        if is_due and most and not shares[i] and result[giver]:
            result[giver], result[i] = result[giver] - 1, 1
    return tuple(result)


@dataclass
class KeptDivision:
    """The last division of a batch, kept while no other would save much: dividing costs more than a small round."""

    _key: tuple[object, ...] = ()
    _shares: tuple[int, ...] = ()
    _age: int = 0
    _idle: dict[str, int] = field(default_factory=dict)

    def divide(
        self, total: int, wanted: Sequence[int], costs: Sequence[Worker], workers: Sequence[str]
    ) -> tuple[int, ...]:
        """Like `divide` of this module, or the last division of as much to the same workers; both with trials."""
        key, self._age = (total, *wanted, *workers), self._age + 1
        if key != self._key or (self._age > _LEAST_AGE and not _is_near_best(self._shares, total, costs)):
            self._key, self._shares, self._age = key, divide(total, wanted, costs), 0
        if 0 in self._shares:
            return self._tried(wanted, costs, workers)
        self._idle.clear()
        return self._shares

    def _tried(self, wanted: Sequence[int], costs: Sequence[Worker], workers: Sequence[str]) -> tuple[int, ...]:
        idle = [self._idle.get(worker, 0) for worker in workers]
        shares = with_trials(self._shares, wanted, costs, idle)
        self._idle = {name: 0 if n else k + 1 for name, n, k in zip(workers, shares, idle, strict=True)}
        return shares


def _finish_seconds(shares: Sequence[int], costs: Sequence[Worker]) -> float:
    """Until the last of those that have anything is done."""
    return max([cost.fixed_seconds + n * cost.unit_seconds for cost, n in zip(costs, shares, strict=True) if n])


def _is_near_best(shares: Sequence[int], total: int, costs: Sequence[Worker]) -> bool:
    """Whether even a division into fractions would save less than is worth the trouble."""
    rate = sum([1 / cost.unit_seconds for cost in costs])
    ideal = (total + sum([cost.fixed_seconds / cost.unit_seconds for cost in costs])) / rate
    slowest = max([cost.unit_seconds for cost in costs])
    return _finish_seconds(shares, costs) <= (1 + _WORTH) * ideal + slowest
