"""Decides when to redistribute work among running nodes, and tells a change of their speed from noise.

A node's cost is its affine prediction times a factor, the median of measured / predicted over its last steps: a median
ignores single slow steps. The division changes if the predicted gain exceeds

    a bound that falls with the number of steps observed: a large gain is believed after 3, the smallest after 24
        (at the first change of a run after 4 and 10)
    what the measured spread of single steps could promise by chance
    twice as much after every change that was reverted: bursts of noise do not show in the spread of single steps

Where no prediction says which part of a node's time is fixed (launching operations, Python, hooks), two divisions
determine it. A model of cost without this part would predict a gain from every sample that leaves the slower node,
until that node has no samples left. Nodes are assumed to differ in speed only: n samples cost node i  s_i (phi + n)
seconds, where phi belongs to the program. Comparing two divisions with n and m samples eliminates the speeds:

    log t_i(n_i) - log t_i(m_i)  =  log (phi + n_i) - log (phi + m_i)  +  a change common to all nodes

Each of a few values of phi gets the likelihood of the observed differences under a t distribution, because a node's
speed may also have changed between the divisions. All nodes finish together once there is nothing to gain, for every
phi; phi determines the predicted gain of a change and its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import median

from evener.oracle.apportion import NodeCost, apportion, finish_seconds

FIXED_FRACTIONS: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
"""Candidate fixed fractions of a step in which all nodes have the same number of samples."""
_MIN_RELATIVE_ERROR = 0.02
"""Smallest relative error of a median time when two divisions are compared."""
_FREEDOM = 3.0
"""Degrees of freedom of the t distribution."""


@dataclass(frozen=True, kw_only=True)
class NodeTiming:
    """The duration of a step on a node under one division.

    Attributes:
        units: units of the node.
        seconds: seconds for these.
        error: standard error of the seconds, relative to them.
    """

    units: int
    seconds: float
    error: float


Timings = Sequence[NodeTiming | None]
"""The timing of every node; None for a node without units."""


def with_fixed_fraction(worker: NodeCost, timing: NodeTiming | None, fraction: float, mean_units: float) -> NodeCost:
    """Return `worker` fitted to its timing, if `fraction` of a step of `mean_units` units is fixed."""
    if timing is None:
        return worker
    phi = _phi(fraction, mean_units)
    unit = timing.seconds / (phi + timing.units)
    return replace(worker, unit_seconds=unit, fixed_seconds=phi * unit)


def fraction_probabilities(earlier: Sequence[Timings], current: Timings, mean_units: float) -> list[float]:
    """Return the probability of each of FIXED_FRACTIONS; they sum to 1.

    Args:
        earlier: previous divisions; the one that differs most from the current one is compared with it.
        current: the present division.
        mean_units: mean units of a node.
    """
    other = max(earlier, key=lambda division: _distance(division, current), default=None)
    if other is None or not _distance(other, current):
        return [1 / len(FIXED_FRACTIONS)] * len(FIXED_FRACTIONS)
    weights = [
        (1 + _misfit(other, current, _phi(fraction, mean_units)) / _FREEDOM) ** (-(_FREEDOM + 1) / 2)
        for fraction in FIXED_FRACTIONS
    ]
    return [weight / sum(weights) for weight in weights]


def _phi(fraction: float, mean_units: float) -> float:
    """Return the number of units that cost as much as the fixed part of a step."""
    return mean_units * fraction / (1 - fraction)


def _pairs(before: Timings, now: Timings) -> list[tuple[NodeTiming, NodeTiming]]:
    return [(old, new) for old, new in zip(before, now, strict=True) if old is not None and new is not None]


def _distance(before: Timings, now: Timings) -> float:
    return max((abs(log(new.units / old.units)) for old, new in _pairs(before, now)), default=0.0)


def _misfit(before: Timings, now: Timings, phi: float) -> float:
    """Return the squared deviations of the nodes' differences from a common one, in standard errors."""
    rows = []
    for old, new in _pairs(before, now):
        expected = log((phi + new.units) / (phi + old.units))
        variance = 2 * _MIN_RELATIVE_ERROR**2 + old.error**2 + new.error**2
        rows.append((log(new.seconds / old.seconds) - expected, 1 / variance))
    common = sum(deviation * weight for deviation, weight in rows) / sum(weight for _, weight in rows)
    return sum(weight * (deviation - common) ** 2 for deviation, weight in rows)


CONFIDENCE: tuple[tuple[int, float], ...] = ((3, 0.35), (6, 0.15), (16, 0.05), (24, 0.02))
"""(observed steps, gain from which the division changes)."""

FIRST_CONFIDENCE: tuple[tuple[int, float], ...] = ((4, 0.04), (10, 0.015))
"""The same for the first decision: the run's first steps are more reliable than a short trial's prediction."""

_WINDOW = CONFIDENCE[-1][0]
_MAX_REMEMBERED_DIVISIONS = 4
"""Number of past divisions whose timings are remembered."""
_MIN_JUMPS = 3
"""Differences between steps that are needed to estimate their spread."""
_MIN_STEPS_FOR_SPREAD = 16
"""Steps from which the spread about the median counts, too; with fewer, a change of speed would dominate it."""
_STANDARD_ERRORS = 3.0
"""A gain within this many standard errors of the least certain node's speed may be noise."""
_MAX_DOUBT = 3
_STEPS_TO_FORGET = 200
"""Steps without a change after which one reverted change is forgotten."""


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """A decision.

    Attributes:
        balance: the state to continue with.
        shares: units of a full micro-batch from now on; None to keep the present ones.
        gain: predicted seconds of a step before / after, minus one.
    """

    balance: Balance
    shares: tuple[int, ...] | None = None
    gain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The estimated costs of the nodes, and the present division of work.

    Attributes:
        costs: predicted cost of n samples on each node.
        shares: units of a full micro-batch on each node.
        factors: last measured / predicted seconds of each node under this division, oldest first.
        jumps: absolute differences of the logarithms of consecutive factors of each node.
        is_tried: whether the first steps of the run have confirmed or corrected the trial's prediction.
        is_learning: whether the fixed part of a node's cost is not predicted and must be fitted.
        earlier: timings of the previous divisions, oldest first.
        moves: units that each node gained with the last change.
        doubt: number of reverted changes that are not forgotten.
        quiet: steps since the last change, or since a reverted change was forgotten.
    """

    costs: tuple[NodeCost, ...]
    shares: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    jumps: tuple[tuple[float, ...], ...] = ()
    is_tried: bool = False
    is_learning: bool = False
    earlier: tuple[tuple[NodeTiming | None, ...], ...] = ()
    moves: tuple[int, ...] = ()
    doubt: int = 0
    quiet: int = 0

    def observe(self, samples: Sequence[int], seconds: Sequence[float]) -> Balance:
        """Return the balance after a step in which node i computed `samples[i]` in `seconds[i]`."""
        none: tuple[tuple[float, ...], ...] = ((),) * len(self.costs)
        factors, jumps = list(self.factors or none), list(self.jumps or none)
        for i, (worker, n, took) in enumerate(zip(self.costs, samples, seconds, strict=True)):
            if n and took > 0:
                factor = took / worker.seconds(n)
                if factors[i]:
                    jumps[i] = (*jumps[i], abs(log(factor / factors[i][-1])))[-_WINDOW:]
                factors[i] = (*factors[i], factor)[-_WINDOW:]
        forgets = self.quiet + 1 >= _STEPS_TO_FORGET
        return replace(
            self,
            factors=tuple(factors),
            jumps=tuple(jumps),
            quiet=0 if forgets else self.quiet + 1,
            doubt=max(0, self.doubt - 1) if forgets else self.doubt,
        )

    def decide(self) -> Rebalancing:
        """Decide whether to change the division, from as many of the last steps as the gain needs to be believed."""
        decision = Rebalancing(balance=self)
        for steps, least_gain in CONFIDENCE if self.is_tried else FIRST_CONFIDENCE:
            if not self._has_seen(steps):
                break
            decision = self._divide(steps)
            bound = max(least_gain, _STANDARD_ERRORS * max(self._errors(steps))) * 2**self.doubt
            if decision.shares is not None and decision.gain > bound:
                return decision
        tried = self.is_tried or self._has_seen(FIRST_CONFIDENCE[-1][0])
        return Rebalancing(balance=replace(self, is_tried=tried), gain=decision.gain)

    def observed(self) -> tuple[NodeCost, ...] | None:
        """Return the cost of samples on each node by its last steps; None if too few steps were observed."""
        if not self._has_seen(_WINDOW):
            return None
        pairs = zip(self.costs, self.factors, strict=True)
        return tuple(_scaled(worker, median(past) if past else 1.0) for worker, past in pairs)

    def _has_seen(self, steps: int) -> bool:
        """Return whether every node with samples was timed in at least `steps` steps."""
        return bool(self.factors) and all(
            len(past) >= steps or n == 0 for past, n in zip(self.factors, self.shares, strict=True)
        )

    def _errors(self, steps: int) -> list[float]:
        """Return the standard error of the median of each node's last `steps` factors, relative to it."""
        return [
            1.2533 * _spread(jumps, past[-steps:]) / sqrt(steps)
            for jumps, past in zip(self.jumps, self.factors, strict=True)
        ]

    def _divide(self, steps: int) -> Rebalancing:
        """Return the best division for the nodes' speeds in the last `steps`."""
        now = tuple(
            _scaled(worker, median(past[-steps:]) if past else 1.0)
            for worker, past in zip(self.costs, self.factors, strict=True)
        )
        timed = tuple(
            NodeTiming(units=n, seconds=worker.seconds(n), error=error) if n and past else None
            for n, worker, error, past in zip(self.shares, now, self._errors(steps), self.factors, strict=True)
        )
        hypotheses, probabilities = self._hypotheses(now, timed)
        workers = hypotheses[_lower_quartile(probabilities)] if self.earlier or not self.is_learning else hypotheses[0]
        shares = apportion(sum(self.shares), workers)
        if shares == self.shares:
            return Rebalancing(balance=self, gain=0.0)
        gains = [finish_seconds(self.shares, costs) / finish_seconds(shares, costs) - 1 for costs in hypotheses]
        gain = _cautious_gain(gains, probabilities)
        return Rebalancing(balance=self._after(shares, workers, timed), shares=shares, gain=gain)

    def _hypotheses(
        self, now: tuple[NodeCost, ...], timed: Sequence[NodeTiming | None]
    ) -> tuple[list[tuple[NodeCost, ...]], Sequence[float]]:
        """Return possible costs of all nodes, and their probabilities: as predicted, or one for each fixed fraction."""
        if not self.is_learning:
            return [now], [1.0]
        mean_units = sum(self.shares) / len(self.shares)
        hypotheses = [
            tuple(with_fixed_fraction(*pair, fraction, mean_units) for pair in zip(now, timed, strict=True))
            for fraction in FIXED_FRACTIONS
        ]
        return hypotheses, fraction_probabilities(self.earlier, timed, mean_units)

    def _after(
        self, shares: tuple[int, ...], workers: tuple[NodeCost, ...], timed: tuple[NodeTiming | None, ...]
    ) -> Balance:
        """Return the balance once `shares` have replaced the division that was `timed`."""
        moves = tuple(new - old for new, old in zip(shares, self.shares, strict=True))
        largest = max(range(len(moves)), key=lambda i: abs(moves[i]))
        is_back = bool(self.moves) and self.moves[largest] * moves[largest] < 0
        return replace(
            self,
            costs=workers,
            shares=shares,
            factors=(),
            is_tried=True,
            earlier=(*self.earlier, timed)[-_MAX_REMEMBERED_DIVISIONS:] if self.is_learning else (),
            moves=moves,
            doubt=min(self.doubt + 1, _MAX_DOUBT) if is_back else max(0, self.doubt - 1),
            quiet=0,
        )


def _spread(jumps: Sequence[float], factors: Sequence[float]) -> float:
    """Return the relative standard deviation of one step's factor, assuming a normal distribution.

    It uses differences between consecutive steps, which a change of speed does not affect, and is larger for few of
    them.
    """
    spread = (1 + 2 / len(jumps)) * median(jumps) / (0.6745 * sqrt(2)) if len(jumps) >= _MIN_JUMPS else 0.0
    if len(factors) < _MIN_STEPS_FOR_SPREAD:
        return spread
    middle = median(factors)
    return max(spread, 1.4826 * median(abs(value - middle) for value in factors) / middle)


def _cautious_gain(gains: Sequence[float], probabilities: Sequence[float]) -> float:
    """Return the mean gain; if the probabilities differ, less two standard deviations, but at least a quarter of it."""
    mean = sum(gain * weight for gain, weight in zip(gains, probabilities, strict=True))
    if max(probabilities) == min(probabilities):
        return mean
    variance = sum(weight * (gain - mean) ** 2 for gain, weight in zip(gains, probabilities, strict=True))
    return max(mean - 2 * sqrt(variance), 0.25 * mean)


def _scaled(worker: NodeCost, factor: float) -> NodeCost:
    return replace(worker, unit_seconds=worker.unit_seconds * factor, fixed_seconds=worker.fixed_seconds * factor)


def _lower_quartile(weights: Sequence[float]) -> int:
    """Return the first index up to which at least a quarter of all weight lies."""
    total = 0.0
    for i, weight in enumerate(weights):
        total += weight
        if total >= 0.25 * sum(weights):
            return i
    return len(weights) - 1
