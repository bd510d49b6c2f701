"""Performs the oracle's moves: brings a rank's tensor from one layout to another, differentiably."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evener.comm.differentiable import (
    all_gather,
    all_reduce,
    copy_from_parallel,
    copy_to_parallel,
    gather_from_parallel,
    reduce_from_parallel,
    reduce_scatter,
    scatter_to_parallel,
)
from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import Layout, Region, Shape
from evener.oracle.division.moves import Move


def mover(move: Move, group: Group) -> Callable[[Tensor], Tensor]:
    """What turns this rank's tensor of layout `move.have` into that of `move.need`."""
    if group.size == 1:
        return lambda x: x
    have, need = move.have.state, move.need.state
    if have == "whole" and need == "split":
        region = move.need.region(group.rank, move.shape)
        return lambda x: part_of(x, region)
    if "split" not in (have, need):
        return _REPLICATED[have, need](group)
    route = Route(regions(move.owners, move.shape, group.size), regions(move.needers, move.shape, group.size))
    exchange = Exchange(group, [route], move.kind)
    return _EXCHANGED[have, need](exchange)


def regions(layout: Layout, shape: Shape, size: int) -> tuple[Region, ...]:
    """What each of `size` ranks has of a value of `shape`."""
    return tuple(layout.region(rank, shape) for rank in range(size))


def part_of(x: Tensor, region: Region) -> Tensor:
    """A region of a whole tensor: a view where it is one stretch along every dim."""
    for dim, intervals in enumerate(region):
        if intervals != ((0, x.shape[dim]),):
            x = _along(x, dim, intervals)
    return x


def _along(x: Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    stretches = [x.narrow(dim, a, b - a) for a, b in intervals] or [x.narrow(dim, 0, 0)]
    return stretches[0] if len(stretches) == 1 else torch.cat(stretches, dim)


Mover = Callable[[Tensor], Tensor]
_REPLICATED: dict[tuple[str, str], Callable[[Group], Mover]] = {
    ("partial", "whole"): lambda group: lambda x: all_reduce(group, x),
    ("partial", "alike"): lambda group: lambda x: reduce_from_parallel(group, x),
    ("alike", "whole"): lambda group: lambda x: copy_to_parallel(group, x),
    ("whole", "alike"): lambda group: lambda x: copy_from_parallel(group, x),
}
_EXCHANGED: dict[tuple[str, str], Callable[[Exchange], Mover]] = {
    ("split", "split"): lambda exchange: lambda x: all_gather(exchange, x)[0],
    ("split", "whole"): lambda exchange: lambda x: all_gather(exchange, x)[0],
    ("split", "alike"): lambda gather: lambda x: gather_from_parallel(gather, x),
    ("partial", "split"): lambda exchange: lambda x: reduce_scatter(exchange, x)[0],
    ("alike", "split"): lambda gather: lambda x: scatter_to_parallel(gather, x),
}
