"""The two ways in which the first system of this kind merged parameters, to be compared with the master's own.

    threads   the arrays are dealt out by index mod 6 to six threads, each of which merges array by array
    device    in place on the master's accelerator, or its processor: cumulative add_, then one div_

Both wait until everything is here, and read every sum of two from memory again; `sync.update.Merging` goes once through
all contributions, block by block, while they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from evener.errors import MissingExtra
from evener.sync.aggregator import WholeMerge
from evener.sync.layout import Flat
from evener.sync.protocol import SyncProtocol

_THREADS = 6


def merge_of(agreement: SyncProtocol) -> WholeMerge | None:
    """What merges contributions; None: the master's cores, in one pass."""
    return {"cores": None, "threads": merge_by_threads, "device": merge_on_device}[agreement.merge]


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


def merge_on_device(out: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
    """Likewise, by PyTorch on the accelerator of this machine if it has one.

    Raises:
        MissingExtra: PyTorch is not installed here.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("--merge device needs PyTorch on the master: pip install 'evener[torch]'") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        for index, array in enumerate(out.floats):
            parts = [torch.from_numpy(source.floats[index]).to(device) for source in sources]
            target = torch.from_numpy(array)
            total = target if device.type == "cpu" else torch.empty_like(target, device=device)
            torch.mul(parts[0], weights[0], out=total)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                total.add_(part, alpha=weight)
            total.div_(sum(weights))
            if total is not target:
                target.copy_(total)
    np.sum([source.counters for source in sources], axis=0, out=out.counters)
