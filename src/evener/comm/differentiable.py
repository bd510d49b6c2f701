"""Collectives that autograd differentiates. The loss is the sum of what all ranks compute.

Copies of a value on several ranks are of one of two states, which differ in what backward brings:

    whole   each copy's gradient is what this rank's use of it adds; their sum is the value's gradient
    alike   every rank does the same with it, so each copy's gradient is the value's gradient already

                            forward             backward
    spread                  own -> needed       sum to the owners
    collect                 sum to the owners   own -> needed
    gather_alike            own -> all          the own part
    slice_alike             the own part        own -> all
    sum_whole               all-reduce          all-reduce
    sum_alike               all-reduce          -
    whole_from_alike        -                   all-reduce
    alike_from_whole        -                   1 / ranks

All ranks run their backward collectives in one order, whatever else each one computes: autograd always runs the node
that was made last among those that are ready, so that backward is forward reversed. A collective keeps an (empty)
tensor for backward and unpacks it first: with activation checkpointing, a region is thus computed again on every rank
before the last of its collectives runs backward, and not later on a rank that has nothing to compute there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.exchange import Exchange
from evener.comm.group import Group

Grads = tuple[Tensor | None, ...]


def spread(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The needed regions of an exchange, from the owned ones."""
    return cast("tuple[Tensor, ...]", _Spread.apply(exchange, *tensors))  # type: ignore[no-untyped-call]


def collect(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The sums of needed regions at their owners."""
    return cast("tuple[Tensor, ...]", _Collect.apply(exchange, *tensors))  # type: ignore[no-untyped-call]


def gather_alike(gather: Exchange, x: Tensor) -> Tensor:
    """All of a value of which this rank owns `x`; `gather` has one route, on which every rank needs all."""
    return cast(Tensor, _GatherAlike.apply(gather, x))  # type: ignore[no-untyped-call]


def slice_alike(gather: Exchange, x: Tensor) -> Tensor:
    """This rank's own part of `x`; `gather` is what would bring all of `x` back."""
    return cast(Tensor, _SliceAlike.apply(gather, x))  # type: ignore[no-untyped-call]


def sum_whole(group: Group, x: Tensor) -> Tensor:
    """Sum of every rank's `x`, whose copies the ranks use differently."""
    return cast(Tensor, _Sum.apply(group, True, x))  # type: ignore[no-untyped-call]


def sum_alike(group: Group, x: Tensor) -> Tensor:
    """Sum of every rank's `x`, with whose copies the ranks all do the same."""
    return cast(Tensor, _Sum.apply(group, False, x))  # type: ignore[no-untyped-call]


def whole_from_alike(group: Group, x: Tensor) -> Tensor:
    """`x`, of which from here on each rank makes another use."""
    return cast(Tensor, _WholeFromAlike.apply(group, x))  # type: ignore[no-untyped-call]


def alike_from_whole(group: Group, x: Tensor) -> Tensor:
    """`x`, of which from here on all ranks make the same use."""
    return cast(Tensor, _Scale.apply(1 / group.size, x))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        _keep(ctx, exchange, tensors)
        return tuple(exchange.spread(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return None, *_kept(ctx).collect(grads)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        _keep(ctx, exchange, tensors)
        return tuple(exchange.collect(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return None, *_kept(ctx).spread(grads)


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Exchange, x: Tensor) -> Tensor:
        _keep(ctx, gather, (x,))
        return gather.spread((x,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return None, _kept(ctx).own_part(grad)


class _SliceAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Exchange, x: Tensor) -> Tensor:
        _keep(ctx, gather, (x,))
        return gather.own_part(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return None, _kept(ctx).spread((grad,))[0]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, used_differently: bool, x: Tensor) -> Tensor:
        _keep(ctx, (group, used_differently), (x,))
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format), "all-reduce")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        group, used_differently = _kept(ctx)
        if not used_differently:
            return None, None, grad
        return None, None, group.all_reduce(grad.clone(memory_format=torch.contiguous_format), "all-reduce")


class _WholeFromAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        _keep(ctx, group, (x,))
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return None, _kept(ctx).all_reduce(grad.clone(memory_format=torch.contiguous_format), "all-reduce")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        return None, grad * ctx.factor


def _keep(ctx: Any, what: Any, tensors: Sequence[Tensor]) -> None:
    ctx.what = what
    ctx.save_for_backward(tensors[0].new_empty(0))


def _kept(ctx: Any) -> Any:
    _ = ctx.saved_tensors  # with checkpointing, the region is computed again now
    return ctx.what
