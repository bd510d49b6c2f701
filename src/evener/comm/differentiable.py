"""Collectives that autograd differentiates. The loss is the sum of what all ranks compute.

In DTensor's words a value of which every rank holds a copy is Replicate. Its gradient is of one of two placements:

    Partial     each rank makes another use of its copy; the sum of the copies' gradients is the value's gradient
    Replicate   every rank does the same with its copy, so that each copy's gradient is the value's gradient already

The names say which; those of the second kind, between ranks that compute alike and ranks that do not, are Megatron's:

                            forward             backward
    all_gather              own -> needed       sum to the owners
    reduce_scatter          sum to the owners   own -> needed
    all_reduce              all-reduce          all-reduce          the result's gradient is Partial
    gather_from_parallel    own -> all          the own part        the result's gradient is Replicate
    scatter_to_parallel     the own part        own -> all          the value's gradient is Replicate
    reduce_from_parallel    all-reduce          -                   the result's gradient is Replicate
    copy_to_parallel        -                   all-reduce          Partial -> Replicate
    copy_from_parallel      -                   1 / ranks           Replicate -> Partial

All ranks run their backward collectives in one order, whatever else each one computes: autograd always runs the node
that was made last among those that are ready, so that backward is forward reversed. A collective keeps an (empty)
tensor for backward and unpacks it first: with activation checkpointing, a region is thus computed again on every rank
before the last of its collectives runs backward, and not later on a rank that has nothing to compute there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.exchange import Exchange
from evener.comm.group import Group

_Collective: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def all_gather(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The needed regions of an exchange, from the owned ones."""
    return _perform(exchange.all_gather, exchange.reduce_scatter, *tensors)


def reduce_scatter(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The sums of needed regions at their owners."""
    return _perform(exchange.reduce_scatter, exchange.all_gather, *tensors)


def all_reduce(group: Group, x: Tensor) -> Tensor:
    """Sum of every rank's `x`, whose copies the ranks use differently."""
    return _perform(_all_reduce(group), _all_reduce(group), x)[0]


def gather_from_parallel(gather: Exchange, x: Tensor) -> Tensor:
    """All of a value of which this rank owns `x`; `gather` has one route, on which every rank needs all."""
    return _perform(gather.all_gather, _own_part(gather), x)[0]


def scatter_to_parallel(gather: Exchange, x: Tensor) -> Tensor:
    """This rank's own part of `x`; `gather` is what would bring all of `x` back."""
    return _perform(_own_part(gather), gather.all_gather, x)[0]


def reduce_from_parallel(group: Group, x: Tensor) -> Tensor:
    """Sum of every rank's `x`, with whose copies the ranks all do the same."""
    return _perform(_all_reduce(group), _unchanged, x)[0]


def copy_to_parallel(group: Group, x: Tensor) -> Tensor:
    """`x`, of which from here on each rank makes another use."""
    return _perform(_unchanged, _all_reduce(group), x)[0]


def copy_from_parallel(group: Group, x: Tensor) -> Tensor:
    """`x`, of which from here on all ranks make the same use."""
    return _perform(_unchanged, lambda grads: [grads[0] * (1 / group.size)], x)[0]


def _all_reduce(group: Group) -> _Collective:
    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [group.all_reduce(tensors[0].clone(memory_format=torch.contiguous_format), "all-reduce")]

    return run


def _own_part(gather: Exchange) -> _Collective:
    return lambda tensors: [gather.own_part(tensors[0])]


def _unchanged(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _perform(forward: _Collective, backward: _Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
    return cast(
        "tuple[Tensor, ...]",
        _Differentiable.apply(forward, backward, *tensors),  # type: ignore[no-untyped-call]
    )


class _Differentiable(torch.autograd.Function):
    """A collective, whose gradients another one brings."""

    @staticmethod
    def forward(ctx: Any, forward: _Collective, backward: _Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run_backward = backward
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # with checkpointing, the region is computed again now
        return None, None, *ctx.run_backward(grads)
