"""Buckets of gradients that are reduced together.

    GradientBucket   whole weights of all ranks, in one all-reduce
    ShardedBucket    parts of weights that some rank of every replica has
    complete_unused  completes weights of buckets that this rank has not used
    last_bucket      the bucket for the next weight
    flagged_buckets  all buckets of weights that each rank may or may not use

A weight without a gradient counts as zeros. If no rank has a gradient, the weight has none afterwards: weight decay and
momentum would change it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.records.errors import InvalidInput
from evener.system.accelerators import moved

BUCKET_BYTES = 25 * 2**20
"""Largest size of a bucket."""


class _Unused(NamedTuple):
    """A weight without a gradient on this rank.

    Attributes:
        weight: without a gradient.
        total: the sum of all ranks' gradients.
        sign: not zero if a rank has a gradient.
    """

    weight: nn.Parameter
    total: Tensor
    sign: Tensor


class GradientBucket:
    """Reduces the gradients of some weights in one all-reduce over `group`.

    If ranks may use different weights, the bucket is `flagged`: it also sends whether a rank has each gradient.
    Otherwise a weight without a gradient here keeps none if the sum is zero. With `averaged`, the sum is divided by the
    number of ranks, so gradients that all ranks have alike stay unchanged.
    """

    def __init__(self, group: Group, flagged: bool = False, averaged: bool = False) -> None:
        self.weights: list[nn.Parameter] = []
        self.unused: list[_Unused] = []
        self.nbytes = 0
        self._group, self._flagged, self._averaged = group, flagged, averaged
        self._factors: list[float] = []
        self._flat = torch.empty(0)
        self._wait: Callable[[], object] | None = None

    def add(self, weight: nn.Parameter, nbytes: int, factor: float = 1.0) -> None:
        """Add `weight` to the bucket; its gradient of `nbytes` counts `factor` times in the sum."""
        self.weights.append(weight)
        self._factors.append(factor)
        self.nbytes += nbytes

    def start(self) -> None:
        """Start the all-reduce."""
        grads = [_dense_gradient(weight) for weight in self.weights]
        parts = [g.flatten() if f == 1 else g.flatten() * f for g, f in zip(grads, self._factors, strict=True)]
        if self._flagged:
            has_gradient = torch.tensor([weight.grad is not None for weight in self.weights], dtype=grads[0].dtype)
            parts.append(moved(has_gradient, grads[0].device))
        self._flat = torch.cat(parts).detach()
        if self._averaged:
            self._flat /= self._group.size
        self._wait = self._group.begin_all_reduce(self._flat, "gradients")

    def forget(self) -> None:
        """Drop the all-reduce that was started."""
        self._wait, self._flat = None, torch.empty(0)

    def finish(self) -> None:
        """Wait for the sum, and set the gradients of weights that have one to their parts of it."""
        assert self._wait is not None
        self._wait()
        self.unused.clear()  # of a step that was broken off
        number = len(self.weights) if self._flagged else 0
        *parts, flags = torch.split(self._flat, [*(weight.numel() for weight in self.weights), number])
        for index, (weight, part) in enumerate(zip(self.weights, parts, strict=True)):
            total = part.view_as(weight)
            if weight.grad is not None:
                _complete(weight, total)
            else:
                self.unused.append(_Unused(weight, total, flags[index] if self._flagged else total))
        self.forget()


class ShardedBucket:
    """Reduces the gradients of weights of which some rank of every replica has parts.

    One of the ranks that have a part sums it and sends the sum to the others. This sends 2 (r-1)/r of its bytes for r
    replicas, as a ring does.
    """

    def __init__(self, group: Group) -> None:
        self.weights: list[nn.Parameter] = []
        self.unused: list[_Unused] = []
        self.nbytes = 0
        self._group = group
        self._routes: list[Route] = []
        self._exchange: Exchange | None = None

    def add(self, weight: nn.Parameter, nbytes: int, route: Route) -> None:
        """Add `weight`, of which ranks have parts."""
        self._routes.append(replace(route, source=len(self.weights)))
        self.weights.append(weight)
        self.nbytes += nbytes

    def sum(self) -> None:
        """Sum the gradients at their owners, and send the sums to all ranks that have the weights."""
        if self._exchange is None:
            self._exchange = Exchange(self._group, self._routes, "gradients")
        sums = self._exchange.all_gather(
            self._exchange.reduce_scatter([_dense_gradient(weight) for weight in self.weights])
        )
        self.unused.clear()
        for weight, total in zip(self.weights, sums, strict=True):
            if weight.grad is not None:
                weight.grad = total
            else:
                self.unused.append(_Unused(weight, total, total))


def complete_unused(buckets: Sequence[GradientBucket | ShardedBucket]) -> None:
    """Set the gradients of weights that only other ranks have used; read once from the device for all `buckets`."""
    unused = [one for bucket in buckets for one in bucket.unused]
    if unused:
        are_used = torch.stack([one.sign.any() for one in unused]).tolist()
        for one in compress(unused, are_used):
            one.weight.grad = one.total
    for bucket in buckets:
        bucket.unused.clear()


_B = TypeVar("_B", GradientBucket, ShardedBucket)


def last_bucket(buckets: list[_B], new: _B, weight: nn.Parameter, nbytes: int, largest: float = BUCKET_BYTES) -> _B:
    """Return the last bucket if `nbytes` more fit into it, else the new one. A bucket has a single dtype."""
    last = buckets[-1] if buckets else None
    if last is None or last.nbytes + nbytes > largest or last.weights[0].dtype != weight.dtype:
        last = new
        buckets.append(last)
    return last


def flagged_buckets(
    weights: Sequence[nn.Parameter], world: Group, averaged: bool = False, largest: float = BUCKET_BYTES
) -> list[GradientBucket]:
    """Return buckets of `weights`, which each rank may use in part; the last weights of the forward pass come first."""
    buckets: list[GradientBucket] = []
    for weight in reversed(weights):
        new = GradientBucket(world, True, averaged)
        last_bucket(buckets, new, weight, weight.nbytes, largest).add(weight, weight.nbytes)
    return buckets


def _dense_gradient(weight: nn.Parameter) -> Tensor:
    """Return this rank's gradient of `weight`, dense."""
    if weight.grad is None:
        return torch.zeros_like(weight)
    return weight.grad.to_dense() if weight.grad.is_sparse else weight.grad


def _complete(weight: nn.Parameter, total: Tensor) -> None:
    """Set the gradient of `weight` to `total`; a sparse gradient stays sparse."""
    own = weight.grad
    if own is not None and own.requires_grad:  # of `backward(create_graph=True)`
        apply: Any = _GradientOfAll.apply
        with torch.enable_grad():
            weight.grad = cast(Tensor, apply(own, total))
        return
    is_sparse = own is not None and own.is_sparse
    weight.grad = total.to_sparse(1) if is_sparse else total


class _GradientOfAll(torch.autograd.Function):
    """(this rank's gradient, that of all ranks) -> the latter, which has no derivative on one rank."""

    @staticmethod
    def forward(_ctx: Any, _own: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise InvalidInput(
            "the program differentiates gradients that backward(create_graph=True) left in its weights, which are of "
            "all nodes, and each node can differentiate its own part alone: put what it differentiates into the loss, "
            "by torch.autograd.grad(loss, weights, create_graph=True) before loss.backward()"
        )


def sum_over(group: Group, weights: Sequence[nn.Parameter]) -> None:
    """Sum every gradient over the ranks of `group`, which all call this with the same weights."""
    for dtype in sorted({weight.dtype for weight in weights}, key=str):
        bucket = GradientBucket(group)
        for weight in weights:
            if weight.dtype == dtype:
                bucket.add(weight, weight.nbytes)
        with group.waiting("gradients"):
            bucket.start()
            bucket.finish()
            complete_unused([bucket])
