"""Performs the oracle's moves: brings a rank's tensor from one layout to another, differentiably.

The loss is the sum of what all ranks compute. So the gradient of a value of which every rank holds a copy is

    whole     the sum of the copies' gradients: each rank makes another use of its copy
    alike     each copy's gradient: every rank does the same with its copy

All ranks run their backward collectives in one order, whatever else each one computes: autograd always runs the node
that was made last among those that are ready, so that backward is forward reversed. A collective keeps an (empty)
tensor for backward and unpacks it first: with activation checkpointing, a region is thus computed again on every rank
before the last of its collectives runs backward, and not later on a rank that has nothing to compute there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import Layout, Move, Region, Shape

Mover: TypeAlias = Callable[[Tensor], Tensor]
"""From this rank's tensor of a layout to that of another."""


def mover(move: Move, group: Group) -> Mover:
    """What turns this rank's tensor of layout `move.have` into that of `move.need`."""
    if group.size == 1:
        return lambda x: x
    have, need = move.have.state, move.need.state
    if have == "whole" and need == "split":
        region = move.need.region(group.rank, move.shape)
        return lambda x: part_of(x, region)
    exchange: Exchange | None = None
    if "split" in (have, need):
        route = Route(regions(move.owners, move.shape, group.size), regions(move.needers, move.shape, group.size))
        exchange = Exchange(group, [route], move.kind)
    collectives, (forward, backward) = _Collectives(group, exchange), _COLLECTIVES[have, need]
    return lambda x: cast(
        Tensor,
        _Differentiable.apply(collectives, forward, backward, x),  # type: ignore[no-untyped-call]
    )


def regions(layout: Layout, shape: Shape, size: int) -> tuple[Region, ...]:
    """What each of `size` ranks has of a value of `shape`."""
    return tuple(layout.region(rank, shape) for rank in range(size))


def part_of(x: Tensor, region: Region) -> Tensor:
    """A region of a whole tensor: a view where it is one stretch along every dim."""
    for dim, intervals in enumerate(region):
        if intervals != ((0, x.shape[dim]),):
            stretches = [x.narrow(dim, a, b - a) for a, b in intervals] or [x.narrow(dim, 0, 0)]
            x = stretches[0] if len(stretches) == 1 else torch.cat(stretches, dim)
    return x


@dataclass(frozen=True)
class _Collectives:
    """What ranks do together with one value.

    Attributes:
        group: the ranks.
        exchange: from the owned parts of the value to the needed ones, if it is divided.
    """

    group: Group
    exchange: Exchange | None = None

    def own_to_needed(self, x: Tensor) -> Tensor:
        """What this rank needs, of what all own."""
        assert self.exchange is not None
        return self.exchange.all_gather([x])[0]

    def sum_to_owners(self, x: Tensor) -> Tensor:
        """What this rank owns, summed over all who need it."""
        assert self.exchange is not None
        return self.exchange.reduce_scatter([x])[0]

    def own_part(self, x: Tensor) -> Tensor:
        """What this rank owns of all of the value."""
        assert self.exchange is not None
        return self.exchange.own_part(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return self.group.all_reduce(x.clone(memory_format=torch.contiguous_format), "all-reduce")

    def unchanged(self, x: Tensor) -> Tensor:
        """The value."""
        return x.view_as(x)

    def one_of_all(self, x: Tensor) -> Tensor:
        """One rank's addend, where all have the same."""
        return x * (1 / self.group.size)


_Collective: TypeAlias = Callable[[_Collectives, Tensor], Tensor]
_COLLECTIVES: dict[tuple[str, str], tuple[_Collective, _Collective]] = {
    ("split", "split"): (_Collectives.own_to_needed, _Collectives.sum_to_owners),
    ("split", "whole"): (_Collectives.own_to_needed, _Collectives.sum_to_owners),
    ("split", "alike"): (_Collectives.own_to_needed, _Collectives.own_part),
    ("partial", "split"): (_Collectives.sum_to_owners, _Collectives.own_to_needed),
    ("partial", "whole"): (_Collectives.all_reduce, _Collectives.all_reduce),
    ("partial", "alike"): (_Collectives.all_reduce, _Collectives.unchanged),
    ("alike", "split"): (_Collectives.own_part, _Collectives.own_to_needed),
    ("alike", "whole"): (_Collectives.unchanged, _Collectives.all_reduce),
    ("whole", "alike"): (_Collectives.unchanged, _Collectives.one_of_all),
}
"""By layout of the value before and after: what is done forward, and with the gradient."""


class _Differentiable(torch.autograd.Function):
    """A collective of a tensor, whose gradient another one brings."""

    @staticmethod
    def forward(ctx: Any, collectives: _Collectives, forward: _Collective, backward: _Collective, x: Tensor) -> Tensor:
        ctx.collectives, ctx.run_backward = collectives, backward
        ctx.save_for_backward(x.new_empty(0))
        return forward(collectives, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # with checkpointing, the region is computed again now
        return None, None, None, ctx.run_backward(ctx.collectives, grad)
