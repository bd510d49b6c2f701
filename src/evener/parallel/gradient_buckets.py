"""Gradients that travel together: weights, some of whose gradients are summed over some ranks.

    GradientBucket   whole weights of all ranks, in one all-reduce
    DividedBucket    parts of weights, that some rank of every replica has
    last_bucket      the bucket that a further weight is put into
    flagged_buckets  all buckets, of weights that each rank may use or not

A weight that has no gradient counts as zeros; where no rank has any, it has none afterwards, too: weight decay and
momentum would move it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group

BUCKET_BYTES = 25 * 2**20
"""Of gradients that travel together, at most."""


class GradientBucket:
    """Weights whose gradients travel together in one all-reduce over `group`.

    If ranks may use different weights, they are `flagged`: whether a rank has a gradient travels along. Otherwise a
    weight that has none here, and of which only zeros come, keeps none. With `averaged` the sum is divided by the
    number of ranks: of what all have alike it makes the same again.
    """

    def __init__(self, group: Group, flagged: bool = False, averaged: bool = False) -> None:
        self.weights: list[nn.Parameter] = []
        self.nbytes = 0
        self._group, self._flagged, self._averaged = group, flagged, averaged
        self._factors: list[float] = []
        self._flat = torch.empty(0)
        self._wait: Callable[[], object] | None = None

    def add(self, weight: nn.Parameter, nbytes: int, factor: float = 1.0) -> None:
        """Let `weight` travel, too; its gradient of `nbytes` counts `factor` times in the sum."""
        self.weights.append(weight)
        self._factors.append(factor)
        self.nbytes += nbytes

    def start(self) -> None:
        """Start to sum."""
        grads = [_own(weight) for weight in self.weights]
        parts = [g.flatten() if f == 1 else g.flatten() * f for g, f in zip(grads, self._factors, strict=True)]
        if self._flagged:
            parts.append(grads[0].new_tensor([weight.grad is not None for weight in self.weights]))
        self._flat = torch.cat(parts).detach()
        if self._averaged:
            self._flat /= self._group.size
        self._wait = self._group.begin_all_reduce(self._flat, "gradients")

    def forget(self) -> None:
        """Let go what was started."""
        self._wait, self._flat = None, torch.empty(0)

    def finish(self) -> None:
        """Wait for the sum, and let every weight's gradient be its part of it."""
        assert self._wait is not None
        self._wait()
        number = len(self.weights) if self._flagged else 0
        *parts, flags = torch.split(self._flat, [*(weight.numel() for weight in self.weights), number])
        for index, (weight, part) in enumerate(zip(self.weights, parts, strict=True)):
            if weight.grad is not None or (flags[index] if self._flagged else part).any():
                _complete(weight, part.view_as(weight))
        self.forget()


class DividedBucket:
    """Parts of weights that some rank of every replica has; their gradients travel together.

    Each part is summed by one of the ranks that have it and sent back to the others: 2 (r-1)/r of its bytes for r
    replicas, as in a ring.
    """

    def __init__(self, group: Group) -> None:
        self.weights: list[nn.Parameter] = []
        self.nbytes = 0
        self._group = group
        self._routes: list[Route] = []
        self._exchange: Exchange | None = None

    def add(self, weight: nn.Parameter, nbytes: int, route: Route) -> None:
        """Let `weight` travel, too, of which ranks have parts."""
        self._routes.append(replace(route, source=len(self.weights)))
        self.weights.append(weight)
        self.nbytes += nbytes

    def sum(self) -> None:
        """Sum the gradients at their owners, and send the sums to all who have the weights."""
        if self._exchange is None:
            self._exchange = Exchange(self._group, self._routes, "gradients")
        sums = self._exchange.all_gather(self._exchange.reduce_scatter([_own(weight) for weight in self.weights]))
        for weight, total in zip(self.weights, sums, strict=True):
            if weight.grad is not None or total.any():
                weight.grad = total


_B = TypeVar("_B", GradientBucket, DividedBucket)


def last_bucket(buckets: list[_B], new: _B, weight: nn.Parameter, nbytes: int, largest: float = BUCKET_BYTES) -> _B:
    """The last bucket if so many bytes still fit, else the new one; a bucket is of one type of numbers."""
    last = buckets[-1] if buckets else None
    if last is None or last.nbytes + nbytes > largest or last.weights[0].dtype != weight.dtype:
        last = new
        buckets.append(last)
    return last


def flagged_buckets(
    weights: Sequence[nn.Parameter], world: Group, averaged: bool = False, largest: float = BUCKET_BYTES
) -> list[GradientBucket]:
    """Buckets of `weights`, those that the forward pass uses last first; each rank may use some of them only."""
    buckets: list[GradientBucket] = []
    for weight in reversed(weights):
        new = GradientBucket(world, True, averaged)
        last_bucket(buckets, new, weight, weight.nbytes, largest).add(weight, weight.nbytes)
    return buckets


def _own(weight: nn.Parameter) -> Tensor:
    """The gradient on this rank, dense."""
    if weight.grad is None:
        return torch.zeros_like(weight)
    return weight.grad.to_dense() if weight.grad.is_sparse else weight.grad


def _complete(weight: nn.Parameter, total: Tensor) -> None:
    """Let the gradient be `total`; one of rows of an embedding stays such."""
    is_sparse = weight.grad is not None and weight.grad.is_sparse
    weight.grad = total.to_sparse(1) if is_sparse else total


def sum_over(group: Group, weights: Sequence[nn.Parameter]) -> None:
    """Let every gradient be the sum over the ranks of `group`, which all call this with the same weights."""
    for dtype in sorted({weight.dtype for weight in weights}, key=str):
        bucket = GradientBucket(group)
        for weight in weights:
            if weight.dtype == dtype:
                bucket.add(weight, weight.nbytes)
        with group.waiting("gradients"):
            bucket.start()
            bucket.finish()
