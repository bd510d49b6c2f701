"""Robust merging, which bounds the effect of one contribution on the common weights.

    clip      the weighted mean; contributions longer than 10 times the running median are shortened to that
    trimmed   in each coordinate the mean without the largest and the smallest fifth (Yin et al., 2018)
    median    in each coordinate the median (Yin et al., 2018)
    krum      the contribution that is nearest to most of the others (Blanchard et al., 2017)

The last three give all contributions the same weight, whatever the number of their samples, and need several at a time;
of n contributions, fewer than n / 5, n / 2 and (n - 2) / 2 may be arbitrary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from math import inf, isfinite, sqrt
from statistics import median

import numpy as np

from evener.agreements.layout import Flat, Floats
from evener.agreements.settings import Robust
from evener.agreements.threads import ThreadPool

MAX_FACTOR = 10.0
"""Limit of a contribution's length, as a factor of the running median."""
_NUM_LENGTHS = 64
_MIN_LENGTHS = 8
"""Lengths that have to be known before any is too large."""
_TRIMMED = 0.2
"""Share of the values of a coordinate that is left out at each end; at least one, of three or more."""


class NormClipper:
    """Shortens contributions that are much longer than usual."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_NUM_LENGTHS)

    def clip(self, contribution: Flat) -> float:
        """Shorten a contribution in place; return the factor, 1 for no change.

        A contribution that is not finite stays so: infinity times zero is NaN.
        """
        norm = norm_of(contribution)
        most = MAX_FACTOR * median(self._norms) if len(self._norms) >= _MIN_LENGTHS else inf
        if norm <= most:
            if isfinite(norm):
                self._norms.append(norm)
            return 1.0
        factor = most / norm if norm > most else 1.0
        with np.errstate(invalid="ignore"):
            for array in contribution.floats:
                np.multiply(array, factor, out=array)
        return factor


def norm_of(flat: Flat) -> float:
    """Return the Euclidean norm of all parameters and statistics; infinite where their squares overflow."""
    with np.errstate(over="ignore"):
        return sqrt(sum(float(np.dot(array, array)) for array in flat.floats))


def merge_robustly(rule: Robust, out: Flat, sources: Sequence[Flat], cores: ThreadPool) -> None:
    """Merge the finite `sources` into `out`, by the rule `trimmed`, `median` or `krum`."""
    if rule == "krum":
        out.copy_from(sources[nearest(sources, cores)])
        return
    for k, array in enumerate(out.floats):
        _merge_array(rule, array, [source.floats[k] for source in sources], cores)
    merge_counters(out, sources)


def merge_counters(out: Flat, sources: Sequence[Flat]) -> None:
    """Write the median increment of each counter, times the number of `sources`, into `out`."""
    if out.counters.size:
        stacked = np.stack([source.counters for source in sources])
        np.multiply(np.sort(stacked, axis=0)[len(sources) // 2], len(sources), out=out.counters)


def num_left_out(rule: Robust, count: int) -> int:
    """Return how many of `count` values of a coordinate `trimmed` or `median` leaves out at each end."""
    if rule == "median":
        return (count - 1) // 2
    return max(1, int(_TRIMMED * count)) if count >= 3 else 0


def nearest(sources: Sequence[Flat], cores: ThreadPool) -> int:
    """Return the index of the source that is nearest to most of the others (Krum)."""
    count = len(sources)
    squares = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            squares[i, j] = squares[j, i] = _squared_distance(sources[i], sources[j], cores)
    return nearest_by(squares)


def nearest_by(squares: Floats) -> int:
    """Return the first index with the least sum of squared distances to its n - f - 2 nearest, f = (n - 3) // 2 being
    bad.

    Args:
        squares: squared distances between each two, symmetric, shape (n, n).
    """
    count = len(squares)
    if count < 3:
        return 0
    num_nearest = count - (count - 3) // 2 - 2
    scores = np.sort(squares, axis=1)[:, 1 : 1 + num_nearest].sum(axis=1)
    return int(np.argmin(scores))


def _squared_distance(one: Flat, other: Flat, cores: ThreadPool) -> float:
    parts: list[float] = []

    for a, b in zip(one.floats, other.floats, strict=True):

        def block(thread: int, start: int, stop: int, a: Floats = a, b: Floats = b) -> None:
            part = np.subtract(a[start:stop], b[start:stop], out=cores.scratch(thread, 0, a[start:stop]))
            parts.append(float(np.dot(part, part)))

        cores.each(0, a.size, a.itemsize, block)
    return sum(parts)


def _merge_array(rule: Robust, out: Floats, sources: Sequence[Floats], cores: ThreadPool) -> None:
    count, cut = len(sources), num_left_out(rule, len(sources))
    pairs = exchanges(count, cut)

    def block(_: int, start: int, stop: int) -> None:
        rows = [source[start:stop].copy() for source in sources]
        spare = np.empty_like(rows[0])
        for i, j in pairs:
            np.minimum(rows[i], rows[j], out=spare)
            np.maximum(rows[i], rows[j], out=rows[j])
            rows[i], spare = spare, rows[i]
        for row in rows[cut + 1 : count - cut]:
            rows[cut] += row
        np.divide(rows[cut], count - 2 * cut, out=out[start:stop])

    cores.each(0, out.size, out.itemsize * count, block)


@cache
def exchanges(count: int, cut: int) -> tuple[tuple[int, int], ...]:
    """Return the exchanges that sort `count` values, so that whole arrays are sorted coordinate by coordinate.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 5.2.2 M), without exchanges that only affect the
    `cut` smallest and the `cut` largest values.

    Returns:
        Index pairs (i, j), i < j, in order: the smaller of both values goes to i, the larger to j.
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    wanted, needed = set(range(cut, count - cut)), list[tuple[int, int]]()
    for pair in reversed(pairs):
        if wanted.intersection(pair):
            wanted.update(pair)
            needed.append(pair)
    return tuple(reversed(needed))
