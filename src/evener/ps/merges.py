"""The two ways in which the first system of this kind merged parameters, to be compared with the master's own.

    threads   the arrays are dealt out by index mod 6 to six threads, each of which merges array by array
    device    in place on the master's accelerator, or its processor (`device_merges`)

Both wait until everything is here, and read every sum of two from memory again; `sync.update.Merging` goes once through
all contributions, block by block, while they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from evener.ps.device_merges import DeviceMerge
from evener.sync.aggregator import WholeMerge
from evener.sync.layout import Flat
from evener.sync.protocol import SyncProtocol

_THREADS = 6


def merge_of(agreement: SyncProtocol) -> WholeMerge | None:
    """What merges contributions; None: the master's cores, as `agreement.robust` says."""
    if agreement.merge == "cores":
        return None
    return merge_by_threads if agreement.merge == "threads" else DeviceMerge(agreement.robust)


def merge_by_threads(out: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
    """Write the mean of `sources`, weighted, into `out`; counters are summed.

    Args:
        out: where the result lies.
        sources: what is merged.
        weights: of the sources, positive.
    """
    arrays = list(zip(out.views().values(), *(source.views().values() for source in sources), strict=True))

    def merge(first: int) -> None:
        with np.errstate(all="ignore"):  # what is not finite is looked for afterwards
            for target, *parts in arrays[first::_THREADS]:
                _merge_array(target, parts, weights)

    with ThreadPoolExecutor(_THREADS, "evener-merge") as pool:
        list(pool.map(merge, range(_THREADS)))


def _merge_array(target: Any, parts: Sequence[Any], weights: Sequence[float]) -> None:
    if target.dtype.kind == "i":
        np.sum(parts, axis=0, out=target)
        return
    np.multiply(parts[0], target.dtype.type(weights[0]), out=target)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        np.add(target, part * target.dtype.type(weight), out=target)
    np.divide(target, target.dtype.type(sum(weights)), out=target)
