"""What of a step is fixed, whatever the number of its samples: learnt from what different divisions took.

Of a small model nearly all of a step is fixed (launching operations, Python, hooks). Taken to be proportional, its cost
promises a gain from every sample that leaves the slower node, which never comes, until that node has none.

Nodes are taken to differ in speed alone: n samples cost node i  s_i (phi + n)  seconds, with a phi that belongs to the
program. Of a division and another one before it, the speeds cancel out:

    log t_i(n_i) - log t_i(m_i)  =  log (phi + n_i) - log (phi + m_i)  +  what befell all nodes alike

Every phi of a few is as plausible as these differences are under it, by a t distribution, since a node may also have
become another one in between. Whatever phi is, all nodes finish together where nothing is to be gained; it decides how
much a change is said to gain, and by how much to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from evener.oracle.apportion import Worker

FIXED_PARTS: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
"""Of a step in which all nodes have as many samples: what may be fixed in it."""
_LEAST_ERROR = 0.02
"""Of the logarithm of a time: no median is better known than that from one division to another."""
_FREEDOM = 3.0
"""Degrees of freedom of the t distribution."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a node took under one division.

    Attributes:
        units: of the node.
        seconds: for these.
        error: of the seconds, relative to them.
    """

    units: int
    seconds: float
    error: float


Division = Sequence[Timed | None]
"""What every node took; None for one that had nothing to do."""


def with_fixed_part(worker: Worker, timed: Timed | None, part: float, usual: float) -> Worker:
    """`worker` as it was timed, if `part` of a step of `usual` units is fixed."""
    if timed is None:
        return worker
    phi = _phi(part, usual)
    unit = timed.seconds / (phi + timed.units)
    return replace(worker, unit_seconds=unit, fixed_seconds=phi * unit)


def plausible(earlier: Sequence[Division], now: Division, usual: float) -> list[float]:
    """How likely each of FIXED_PARTS is; sums to 1.

    Args:
        earlier: divisions.
        now: the present one.
        usual: units of a node, on the average.
    """
    other = max(earlier, key=lambda one: _distance(one, now), default=None)
    if other is None or not _distance(other, now):
        return [1 / len(FIXED_PARTS)] * len(FIXED_PARTS)
    weights = [(1 + _misfit(other, now, _phi(part, usual)) / _FREEDOM) ** (-(_FREEDOM + 1) / 2) for part in FIXED_PARTS]
    return [weight / sum(weights) for weight in weights]


def _phi(part: float, usual: float) -> float:
    """Units that cost as much as what is fixed."""
    return usual * part / (1 - part)


def _pairs(before: Division, now: Division) -> list[tuple[Timed, Timed]]:
    return [(one, two) for one, two in zip(before, now, strict=True) if one is not None and two is not None]


def _distance(before: Division, now: Division) -> float:
    return max((abs(log(two.units / one.units)) for one, two in _pairs(before, now)), default=0.0)


def _misfit(before: Division, now: Division, phi: float) -> float:
    """Squares of what the differences of all nodes have besides a common one, in standard errors."""
    rows = []
    for one, two in _pairs(before, now):
        expected = log((phi + two.units) / (phi + one.units))
        variance = 2 * _LEAST_ERROR**2 + one.error**2 + two.error**2
        rows.append((log(two.seconds / one.seconds) - expected, 1 / variance))
    common = sum(off * weight for off, weight in rows) / sum(weight for _, weight in rows)
    return sum(weight * (off - common) ** 2 for off, weight in rows)
