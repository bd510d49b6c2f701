"""Estimates which fraction of a step is fixed, independent of the number of samples, from the timings of two divisions.

For a small model nearly all of a step is fixed (launching operations, Python, hooks). A model of cost without this part
would predict a gain from every sample that leaves the slower node, until that node has no samples left.

Nodes are assumed to differ in speed only: n samples cost node i  s_i (phi + n)  seconds, where phi belongs to the
program. Comparing two divisions with n and m samples eliminates the speeds:

    log t_i(n_i) - log t_i(m_i)  =  log (phi + n_i) - log (phi + m_i)  +  a change common to all nodes

Each of a few values of phi gets the likelihood of the observed differences under a t distribution, because a node's
speed may also have changed between the divisions. All nodes finish together once there is nothing to gain, for every
phi; phi determines the predicted gain of a change and its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from evener.oracle.apportion import Worker

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


def with_fixed_fraction(worker: Worker, timing: NodeTiming | None, fraction: float, mean_units: float) -> Worker:
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
