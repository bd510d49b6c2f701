"""Rounds a table of proportional counts so that every cell, every row and every column comes out right together.

Rounding each cell to the nearest leaves rows and columns with wrong totals; apportioning row by row (each class by
itself) leaves columns (whole shares) off by up to the number of rows. A rounding in which every cell and every total is
the floor or the ceiling of the exact one always exists (M. Bacharach, Matrix rounding problems, 1966: flows with whole
bounds are whole), and is found here in two steps: deal every row's left-over units to the columns that are owed most,
then mend columns that ended outside their bounds by moving units along alternating paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evener.errors import require

Table = NDArray[np.int64]
Mask = NDArray[np.bool_]


def round_table(counts: Sequence[int], weights: Sequence[float]) -> Table:
    """Whole numbers near counts[k] * weights[j] / sum(weights), [K, J].

    Row k sums to counts[k]; every cell is the floor or the ceiling of its exact value; every column's total is the
    floor or the ceiling of its exact total. Exact means exact: a weight is the decimal number that Python prints.

    Args:
        counts: units of every row, [K], not negative.
        weights: relative size of every column, [J].

    Raises:
        InvalidValue: `weights` is empty, negative, not finite or all zero.
    """
    parts = _whole_parts(weights)
    whole = sum(parts)
    quotas = [[divmod(count * part, whole) for part in parts] for count in counts]
    floors = np.array([[q for q, _ in row] for row in quotas], np.int64).reshape(len(counts), len(parts))
    rests = np.array([[r / whole for _, r in row] for row in quotas], float).reshape(floors.shape)
    allowed = np.array([[r > 0 for _, r in row] for row in quotas], bool).reshape(floors.shape)
    below = floors.sum(axis=0)
    low = np.array([sum(counts) * part // whole for part in parts]) - below
    high = np.array([-(-sum(counts) * part // whole) for part in parts]) - below
    extra = _deal(np.array(counts, np.int64) - floors.sum(axis=1), rests, allowed)
    _mend(extra, allowed, low, high)
    return floors + extra


def _whole_parts(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers in the same proportion: 0.1, 0.25 -> 2, 5."""
    values = [float(weight) for weight in weights]
    valid = all(math.isfinite(value) and value >= 0 for value in values) and any(values)
    require(valid, "weights", list(weights), "finite, not negative, and positive for at least one node")
    fractions = [Fraction(repr(value)) for value in values]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _deal(left: Table, rests: NDArray[np.float64], allowed: Mask) -> Mask:
    """Gives the `left[k]` units of every row k to different columns, to those that are owed most so far, [K, J]."""
    extra = np.zeros_like(allowed)
    owed = np.zeros(allowed.shape[1])
    for k, units in enumerate(left):
        owed += rests[k]
        chosen = np.argsort(np.where(allowed[k], -owed, np.inf), kind="stable")[:units]
        extra[k, chosen] = True
        owed[chosen] -= 1
    return extra


def _mend(extra: Mask, allowed: Mask, low: Table, high: Table) -> None:
    """Moves units within rows until every column of `extra` sums to low..high; every round brings one unit home."""
    while True:
        totals = extra.sum(axis=0)
        if (totals > high).any():
            path = _path(extra, allowed, totals > high, totals < high)
        elif (totals < low).any():
            path = _path(extra, allowed, totals > low, totals < low)
        else:
            return
        for a, b in pairwise(path):
            k = np.flatnonzero(extra[:, a] & allowed[:, b] & ~extra[:, b])[0]
            extra[k, a], extra[k, b] = False, True


def _path(extra: Mask, allowed: Mask, sources: Mask, targets: Mask) -> list[int]:
    """The shortest way from a source to a target column; a step a -> b needs a row with a unit that can move so."""
    steps = (extra.T.astype(np.int64) @ (allowed & ~extra).astype(np.int64)) > 0
    paths = [[int(column)] for column in np.flatnonzero(sources)]
    seen = sources.copy()
    for path in paths:  # grows while it is walked: breadth first
        if targets[path[-1]]:
            return path
        for column in np.flatnonzero(steps[path[-1]] & ~seen):
            seen[column] = True
            paths.append([*path, int(column)])
    raise AssertionError("a rounding exists, so there is a path")
