"""Merging, our way: one pass over flat arrays, weighted, on all cores, each part while the next still arrives.

With weights n_0, n_1, ... (samples), N = sum n_i, the mean of the sources c_i is computed block by block as

    out = n_0 / N * (c_0 + n_1 / n_0 * c_1 + n_2 / n_0 * c_2 + ...)

which for equal weights needs one multiplication in all. A block of `out` stays in the cache until it is done, so every
source is read from memory once and the result is written once. The sum is taken in the order of the sources whatever
has arrived when, in whatever blocks and threads: the bits of the result depend on nothing else.

The same pass looks whether the result is finite: it is, if and only if all sources are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from evener.sync.cores import BLOCK_BYTES, Cores
from evener.sync.flat import Flat
from evener.sync.layout import Floats


class Merging:
    """One weighted mean of states or changes in the making; counters are summed.

    Args:
        out: where the result lies in the end.
        sources: what is merged, perhaps still arriving.
        weights: of the sources, positive; only their ratios matter.
        cores: that do it.
    """

    def __init__(self, out: Flat, sources: Sequence[Flat], weights: Sequence[float], cores: Cores) -> None:
        self._out, self._sources, self._cores = out, sources, cores
        self._arrays = [
            (array, tuple([source.floats[k] for source in sources]), offset)
            for k, (array, offset) in enumerate(zip(out.floats, out.layout.float_offsets, strict=True))
        ]
        self._done = [0] * len(self._arrays)
        self._ratios = tuple(weight / weights[0] for weight in weights)
        self._share = weights[0] / sum(weights)
        self._is_finite = True

    def advance(self, num_bytes: int) -> None:
        """Merge what can be merged by blocks, now that the first `num_bytes` of every source have come."""
        for k, (out, sources, offset) in enumerate(self._arrays):
            start, stop = self._done[k], min((num_bytes - offset) // out.itemsize, out.size)
            if (stop - start) * out.itemsize >= BLOCK_BYTES or start < stop == out.size:
                self._merge(out, sources, start, stop)
                self._done[k] = stop

    def finish(self) -> tuple[int, ...]:
        """Merge the rest, everything having arrived.

        Returns:
            Which sources have to be left out, because they are not finite; empty if the result is good. Should finite
            sources have a sum beyond what the dtype holds, that is all of them.
        """
        self.advance(self._out.layout.num_bytes)
        self._sum_counters()
        if self._is_finite:
            return ()
        bad = tuple(i for i, source in enumerate(self._sources) if not is_finite(source, self._cores))
        return bad or tuple(range(len(self._sources)))

    def _sum_counters(self) -> None:
        total = self._out.counters
        np.copyto(total, self._sources[0].counters)
        for source in self._sources[1:]:
            np.add(total, source.counters, out=total)

    def _merge(self, out: Floats, sources: tuple[Floats, ...], start: int, stop: int) -> None:
        first, rest = sources[0], tuple(zip(sources[1:], self._ratios[1:], strict=True))

        def block(thread: int, a: int, b: int) -> None:
            total, sum_so_far = out[a:b], first[a:b]
            scratch = self._cores.scratch(thread, 0, total)
            for source, ratio in rest:
                part = source[a:b] if ratio == 1 else np.multiply(source[a:b], ratio, out=scratch)
                sum_so_far = np.add(sum_so_far, part, out=total)
            np.multiply(sum_so_far, self._share, out=total)
            if not _block_is_finite(total):
                self._is_finite = False

        self._cores.each(start, stop, out.itemsize, block)


def is_finite(flat: Flat, cores: Cores) -> bool:
    """Whether no number in `flat` is infinite or NaN."""
    found = True

    def block(_: int, a: int, b: int) -> None:
        nonlocal found
        if not _block_is_finite(array[a:b]):
            found = False

    for array in flat.floats:
        cores.each(0, array.size, array.itemsize, block)
    return found


def _block_is_finite(block: Floats) -> bool:
    """Whether all of `block` is finite: then its largest and its smallest number are; a NaN would be either."""
    return isfinite(np.maximum.reduce(block)) and isfinite(np.minimum.reduce(block))
