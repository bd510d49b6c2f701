"""Divides a data set among uneven nodes so that every share is a small copy of the whole: the same mix of classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.data.rounding import round_table
from evener.errors import require


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
