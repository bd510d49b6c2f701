"""Differentiable redistribution of tensors: performs the oracle's moves from one layout to another.

The loss is the sum over all ranks. So the gradient of a value of which every rank holds a copy is

    whole     the sum of the copies' gradients: each rank uses its copy differently
    alike     each copy's gradient: every rank does the same with its copy

All ranks run their backward collectives in the same order: among the nodes that are ready, autograd runs the one made
last, so that backward is the reverse of forward. A collective saves an (empty) tensor for backward and unpacks it
first. With activation checkpointing, every rank then recomputes a region before the last of its collectives runs
backward, even if it has nothing to compute there.
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
"""Turns this rank's tensor of one layout into its tensor of another."""


def mover(move: Move, group: Group) -> Mover:
    """Return the function from this rank's tensor of layout `move.have` to its tensor of `move.need`."""
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
    """Return the region of a value of `shape` that each of `size` ranks has."""
    return tuple(layout.region(rank, shape) for rank in range(size))


def part_of(x: Tensor, region: Region) -> Tensor:
    """Return a region of a whole tensor: a view if it is a single interval along every dim."""
    for dim, intervals in enumerate(region):
        if intervals != ((0, x.shape[dim]),):
            parts = [x.narrow(dim, a, b - a) for a, b in intervals] or [x.narrow(dim, 0, 0)]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


@dataclass(frozen=True)
class _Collectives:
    """The collectives of one value.

    Attributes:
        group: The ranks.
        exchange: Exchange from the owned parts of a divided value to the needed ones.
    """

    group: Group
    exchange: Exchange | None = None

    def own_to_needed(self, x: Tensor) -> Tensor:
        """Return the region that this rank needs, gathered from the owners."""
        assert self.exchange is not None
        return self.exchange.all_gather([x])[0]

    def sum_to_owners(self, x: Tensor) -> Tensor:
        """Return the region that this rank owns, summed over all ranks that need it."""
        assert self.exchange is not None
        return self.exchange.reduce_scatter([x])[0]

    def own_part(self, x: Tensor) -> Tensor:
        """Return the region of the whole value that this rank owns."""
        assert self.exchange is not None
        return self.exchange.own_part(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self.group.all_reduce(x.clone(memory_format=torch.contiguous_format), "all-reduce")

    def unchanged(self, x: Tensor) -> Tensor:
        """Return the value."""
        return x.view_as(x)

    def one_of_all(self, x: Tensor) -> Tensor:
        """Divide the value by the number of ranks, all of which have the same."""
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
"""The collectives of forward and backward, by layout of the value before and after."""


class _Differentiable(torch.autograd.Function):
    """One collective of a tensor, and another one of its gradient."""

    @staticmethod
    def forward(ctx: Any, collectives: _Collectives, forward: _Collective, backward: _Collective, x: Tensor) -> Tensor:
        ctx.collectives, ctx.run_backward = collectives, backward
        ctx.save_for_backward(x.new_empty(0))
        return forward(collectives, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # with checkpointing, this recomputes the region now
        return None, None, None, ctx.run_backward(ctx.collectives, grad)
