"""Divides a data set among uneven nodes so that every share is a small copy of the whole: the same mix of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.records.errors import require

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


def _deal(remainder: Table, rests: NDArray[np.float64], allowed: Mask) -> Mask:
    """Give the `remainder[k]` units of every row k to different columns, those that are owed most so far, [K, J]."""
    extra = np.zeros_like(allowed)
    owed = np.zeros(allowed.shape[1])
    for k, units in enumerate(remainder):
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


def order_of_parts(parts: Sequence[NDArray[np.int64]], seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples of `parts` one behind the other, each part shuffled as seed and epoch decide."""
    draws = [np.random.default_rng([seed, epoch, number]) for number in range(len(parts))]
    return np.concatenate([draw.permutation(part) for draw, part in zip(draws, parts, strict=True)])


def class_balanced_shares(labels: NDArray[Any], weights: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """The sample indices of every node, in proportion to `weights` and with the class mix of the whole.

    Every sample goes to exactly one node. With N samples, N_k of them of class k, and p_j = weights[j] / sum(weights):
    node j gets floor or ceil of N_k p_j samples of class k, and floor or ceil of N p_j samples in all. Both are the
    nearest whole numbers above and below, so no count is ever one sample or more away from proportional.

    Args:
        labels: class of every sample, [N]; anything that can be sorted.
        weights: relative size of every node's share, [J]; a node of weight 0 gets nothing.
        seed: decides which samples of a class go where; the counts do not depend on it.

    Returns:
        One ascending array of indices into `labels` per node.

    Raises:
        InvalidValue: `labels` is not one-dimensional, or `weights` is empty, negative, not finite or all zero.
    """
    labels = np.asarray(labels)
    require(labels.ndim == 1, "labels", labels.shape, "one-dimensional, a class for every sample")
    counts = np.unique(labels, return_counts=True)[1]
    table = round_table(counts.tolist(), weights)
    classes = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    generator = np.random.default_rng(seed)
    piles: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in weights]
    for members, row in zip(classes, table, strict=False):  # no samples: one empty class, no row
        for pile, part in zip(piles, np.split(generator.permutation(members), np.cumsum(row)[:-1]), strict=True):
            pile.append(part)
    return [np.sort(np.concatenate(pile)) for pile in piles]
