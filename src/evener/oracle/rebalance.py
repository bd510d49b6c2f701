"""When work is divided anew among nodes that are at work: a change of theirs is told from noise.

A node's cost is its affine prediction times a factor, the median of measured / predicted over its last steps: a median
shrugs off a single slow step. A division is changed when that is predicted to shorten the step by more than

    a bound that falls with the steps behind the prediction: a large gain is believed after 3, the smallest after 24
    what the spread of single steps, as measured, could promise by chance
    twice as much after every change that was taken back: noise that comes in bursts is in no spread of single steps

Where no prediction says what of a node's time is fixed, two divisions tell (`fixed_part.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import median

from evener.oracle.affine_fit import FIXED_PARTS, Timed, plausible, with_fixed_part
from evener.oracle.apportion import Worker, apportion, finish_seconds

CONFIDENCE: tuple[tuple[int, float], ...] = ((3, 0.35), (6, 0.15), (16, 0.05), (24, 0.02))
"""(steps behind a prediction, gain from which it is acted upon)."""

AT_FIRST: tuple[tuple[int, float], ...] = ((4, 0.04), (10, 0.015))
"""Likewise for the first decision: what a short trial promised is worth less than the first steps of the run itself."""

_WINDOW = CONFIDENCE[-1][0]
_REMEMBERED = 4
"""Divisions of which is remembered what they took."""
_FEWEST = 3
"""Differences between steps that tell their spread."""
_CERTAIN = 16
"""Steps from which their spread about a common middle tells it, too: of fewer, a change among them would be all."""
_STANDARD_ERRORS = 3.0
"""Of the least certain node's speed: a gain within these may be noise."""
_MOST_DOUBT = 3
_PATIENT = 200
"""Steps without a change after which the last one that was taken back is forgotten."""


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """What to do now.

    Attributes:
        balance: to go on with.
        shares: of a full micro-batch from now on; None to leave them.
        gain: predicted seconds of a step before by after, minus one.
    """

    balance: Balance
    shares: tuple[int, ...] | None = None
    gain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What is known about the nodes' costs, and how the work is divided now.

    Attributes:
        workers: predicted cost of n samples, one a node.
        shares: of a full micro-batch, one a node.
        factors: the last measured / predicted seconds of every node under this division, oldest first.
        jumps: by how much the logarithms of every node's last factors differed from one step to the next.
        is_tried: whether the first steps of the run have confirmed or corrected the trial's promise.
        is_learning: whether what is fixed in a node's cost is not predicted, but has to be learnt.
        earlier: what the divisions before took, one entry a node, oldest first.
        moves: units that every node was given with the last change.
        doubt: changes that were taken back, as far as they are not forgotten.
        quiet: steps since the last change, or since one was forgotten.
    """

    workers: tuple[Worker, ...]
    shares: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    jumps: tuple[tuple[float, ...], ...] = ()
    is_tried: bool = False
    is_learning: bool = False
    earlier: tuple[tuple[Timed | None, ...], ...] = ()
    moves: tuple[int, ...] = ()
    doubt: int = 0
    quiet: int = 0

    def observe(self, samples: Sequence[int], seconds: Sequence[float]) -> Balance:
        """The balance after a step in which node i computed `samples[i]` in `seconds[i]`."""
        none: tuple[tuple[float, ...], ...] = ((),) * len(self.workers)
        factors, jumps = list(self.factors or none), list(self.jumps or none)
        for i, (worker, n, took) in enumerate(zip(self.workers, samples, seconds, strict=True)):
            if n and took > 0:
                factor = took / worker.seconds(n)
                if factors[i]:
                    jumps[i] = (*jumps[i], abs(log(factor / factors[i][-1])))[-_WINDOW:]
                factors[i] = (*factors[i], factor)[-_WINDOW:]
        forgets = self.quiet + 1 >= _PATIENT
        return replace(
            self,
            factors=tuple(factors),
            jumps=tuple(jumps),
            quiet=0 if forgets else self.quiet + 1,
            doubt=max(0, self.doubt - 1) if forgets else self.doubt,
        )

    def decide(self) -> Rebalancing:
        """Divide anew if that is predicted to pay, by as many of the last steps as the gain needs to be believed."""
        decision = Rebalancing(balance=self)
        for steps, least_gain in CONFIDENCE if self.is_tried else AT_FIRST:
            if not self._has_seen(steps):
                break
            decision = self._divide(steps)
            bound = max(least_gain, _STANDARD_ERRORS * max(self._errors(steps))) * 2**self.doubt
            if decision.shares is not None and decision.gain > bound:
                return decision
        tried = self.is_tried or self._has_seen(AT_FIRST[-1][0])
        return Rebalancing(balance=replace(self, is_tried=tried), gain=decision.gain)

    def observed(self) -> tuple[Worker, ...] | None:
        """What samples cost the nodes, by their last steps; None if too few were seen to rely on."""
        if not self._has_seen(_WINDOW):
            return None
        pairs = zip(self.workers, self.factors, strict=True)
        return tuple(_scaled(worker, median(past) if past else 1.0) for worker, past in pairs)

    def _has_seen(self, steps: int) -> bool:
        """Whether every node that has samples was timed in so many steps."""
        return bool(self.factors) and all(
            len(past) >= steps or n == 0 for past, n in zip(self.factors, self.shares, strict=True)
        )

    def _errors(self, steps: int) -> list[float]:
        """Standard error of the median of every node's last `steps` factors, relative to it."""
        return [
            1.2533 * _spread(jumps, past[-steps:]) / sqrt(steps)
            for jumps, past in zip(self.jumps, self.factors, strict=True)
        ]

    def _divide(self, steps: int) -> Rebalancing:
        """By the nodes' speed of the last `steps`."""
        now = tuple(
            _scaled(worker, median(past[-steps:]) if past else 1.0)
            for worker, past in zip(self.workers, self.factors, strict=True)
        )
        timed = tuple(
            Timed(units=n, seconds=worker.seconds(n), error=error) if n and past else None
            for n, worker, error, past in zip(self.shares, now, self._errors(steps), self.factors, strict=True)
        )
        ways, likely = self._ways(now, timed)
        workers = ways[_lower_quartile(likely)] if self.earlier or not self.is_learning else ways[0]
        shares = apportion(sum(self.shares), workers)
        if shares == self.shares:
            return Rebalancing(balance=self, gain=0.0)
        gain = _surely([finish_seconds(self.shares, way) / finish_seconds(shares, way) - 1 for way in ways], likely)
        return Rebalancing(balance=self._after(shares, workers, timed), shares=shares, gain=gain)

    def _ways(
        self, now: tuple[Worker, ...], timed: Sequence[Timed | None]
    ) -> tuple[list[tuple[Worker, ...]], Sequence[float]]:
        """What units may cost the nodes, and how likely each is: as predicted, or with one fixed part or another."""
        if not self.is_learning:
            return [now], [1.0]
        usual = sum(self.shares) / len(self.shares)
        ways = [
            tuple(with_fixed_part(*pair, part, usual) for pair in zip(now, timed, strict=True)) for part in FIXED_PARTS
        ]
        return ways, plausible(self.earlier, timed, usual)

    def _after(self, shares: tuple[int, ...], workers: tuple[Worker, ...], timed: tuple[Timed | None, ...]) -> Balance:
        """What is known once `shares` have taken the place of those that took what was `timed`."""
        moves = tuple(new - old for new, old in zip(shares, self.shares, strict=True))
        most = max(range(len(moves)), key=lambda i: abs(moves[i]))
        is_back = bool(self.moves) and self.moves[most] * moves[most] < 0
        return replace(
            self,
            workers=workers,
            shares=shares,
            factors=(),
            is_tried=True,
            earlier=(*self.earlier, timed)[-_REMEMBERED:] if self.is_learning else (),
            moves=moves,
            doubt=min(self.doubt + 1, _MOST_DOUBT) if is_back else max(0, self.doubt - 1),
            quiet=0,
        )


def _spread(jumps: Sequence[float], factors: Sequence[float]) -> float:
    """Standard deviation of one step's factor, relative to it, as if factors were normally distributed.

    By the differences from one step to the next, which a change among them does not touch; of few, more is assumed.
    """
    found = (1 + 2 / len(jumps)) * median(jumps) / (0.6745 * sqrt(2)) if len(jumps) >= _FEWEST else 0.0
    if len(factors) < _CERTAIN:
        return found
    middle = median(factors)
    return max(found, 1.4826 * median(abs(value - middle) for value in factors) / middle)


def _surely(gains: Sequence[float], likely: Sequence[float]) -> float:
    """What is gained on the average; where something is known, less two standard deviations or three quarters."""
    mean = sum(gain * weight for gain, weight in zip(gains, likely, strict=True))
    if max(likely) == min(likely):
        return mean
    variance = sum(weight * (gain - mean) ** 2 for gain, weight in zip(gains, likely, strict=True))
    return max(mean - 2 * sqrt(variance), 0.25 * mean)


def _scaled(worker: Worker, factor: float) -> Worker:
    return replace(worker, unit_seconds=worker.unit_seconds * factor, fixed_seconds=worker.fixed_seconds * factor)


def _lower_quartile(weights: Sequence[float]) -> int:
    """The first index up to which a quarter of all weight lies."""
    total = 0.0
    for i, weight in enumerate(weights):
        total += weight
        if total >= 0.25 * sum(weights):
            return i
    return len(weights) - 1
