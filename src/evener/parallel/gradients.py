"""Sums gradients over the ranks that have a weight: over all for whole weights, along the data axis for divided ones.

Whole weights travel in buckets, from those used last in the forward pass to those used first, while backward goes on.
The order of buckets is fixed, and backward runs in one order on all ranks, so they meet the same collectives in the
same order. What is divided among the ranks of a replica is complete there; with several replicas, each part is summed
by one of the ranks that have it and sent back to the others: 2 (r-1)/r of its bytes for r replicas, as in a ring.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.weights import holders, owners
from evener.parallel.sharded import ShardedModel

_BUCKET_BYTES = 25 * 2**20


class GradientSums:
    """Completes the gradients of a model's weights before `backward()` returns.

    Args:
        model: this rank's part.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model, self._world = model, model.mesh.world
        self._sums = True
        self._started = False
        self._launched = 0
        self._buckets: list[_Bucket] = []
        self._divided: list[_Divided] = []
        if self._world.size > 1:
            self._sort(model)
        hooked: list[tuple[Any, int | None]] = [(w, i) for i, one in enumerate(self._buckets) for w, _ in one.weights]
        hooked += [(weight, None) for one in self._divided for weight in one.weights]
        for weight, bucket in hooked:
            weight.register_post_accumulate_grad_hook(partial(self._arrived, bucket=bucket))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients stay on this rank: for all but the last micro-batch of a step."""
        self._sums = False
        yield
        self._sums = True

    def clip(self, largest: float) -> float:
        """Shrink all gradients, if need be, so that those of the whole model have a norm of `largest`; the norm before.

        Every rank of the replica calls this after backward.
        """
        group = self._model.mesh.group
        own = sum(float(grad.square().sum()) for grad in self._grads(divided_only=not group.is_leader))
        norm = sum(np.frombuffer(row)[0] for row in group.all_gather_bytes(np.float64(own).tobytes())) ** 0.5
        for grad in self._grads():
            grad.mul_(min(1.0, largest / (norm + 1e-6)))
        return float(norm)

    def _grads(self, divided_only: bool = False) -> Iterator[Tensor]:
        """Gradients of this rank's weights, or only of those of which other ranks have other parts."""
        for name, weight in self._model.part.named_parameters():
            shard = self._model.shards.get(name)
            divided = shard is not None and shard.layout.state == "split"
            if weight.grad is not None and (divided or not divided_only):
                yield weight.grad

    def _sort(self, model: ShardedModel) -> None:
        """Put the weights that ranks share into buckets, those that the forward pass uses last first."""
        several = len(model.plans) > 1
        for name, shard in reversed(model.shards.items()):
            if not shard.trainable:
                continue
            weight: nn.Parameter = operator.attrgetter(name)(model.part)
            whole = prod(shard.shape) * weight.element_size()  # the own part's size would make other batches elsewhere
            if shard.layout.state == "split":
                if several:
                    layouts = [plan.shards[name].layout for plan in model.plans]
                    route = Route(owners(layouts, shard.shape), holders(layouts, shard.shape))
                    _last(self._divided, _Divided, weight.dtype, whole).add(weight, route)
            elif shard.layout.state == "whole" or several:
                copies = model.mesh.group.size if shard.layout.state == "alike" else 1
                _last(self._buckets, _Bucket, weight.dtype, whole).weights.append((weight, 1 / copies))

    def _arrived(self, _: Tensor, bucket: int | None) -> None:
        """A weight's gradient is complete on this rank."""
        if not self._sums:
            return
        if not self._started:
            self._start()
        if bucket is not None:
            self._buckets[bucket].missing -= 1
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
            self._launch()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.weights)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _launch(self) -> None:
        """Start to sum the next bucket; a weight that the loss did not depend on counts as zeros."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._world.timer.break_for_others()
        grads = [(weight if weight.grad is None else weight.grad, weight, factor) for weight, factor in bucket.weights]
        parts = [g.flatten() * (0 if g is weight else factor) for g, weight, factor in grads]
        bucket.flat = torch.cat(parts).detach()
        bucket.work = dist.all_reduce(bucket.flat, group=self._world.process_group, async_op=True)
        self._world.count_all_reduce(bucket.flat, "gradients")

    def _finish(self) -> None:
        """Wait for all buckets, then sum what is divided."""
        while self._launched < len(self._buckets):
            self._launch()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.hand_out()
        for divided in self._divided:
            divided.sum(self._world)


@dataclass
class _Bucket:
    """Weights whose gradients travel together, each with its factor in the sum."""

    weights: list[tuple[nn.Parameter, float]] = field(default_factory=list)
    missing: int = 0
    nbytes: int = 0
    dtype: torch.dtype = torch.float32
    flat: Tensor | None = None
    work: dist.Work | None = None

    def hand_out(self) -> None:
        """Wait for the sum, and let every weight's gradient be its part of it."""
        assert self.work is not None
        assert self.flat is not None
        self.work.wait()
        parts = torch.split(self.flat, [weight.numel() for weight, _ in self.weights])
        for (weight, _), part in zip(self.weights, parts, strict=True):
            weight.grad = part.view_as(weight)
        self.work = self.flat = None


@dataclass
class _Divided:
    """Parts of weights that some rank of every replica has; their gradients travel together."""

    weights: list[nn.Parameter] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    nbytes: int = 0
    dtype: torch.dtype = torch.float32
    exchange: Exchange | None = None

    def add(self, weight: nn.Parameter, route: Route) -> None:
        self.routes.append(replace(route, source=len(self.weights)))
        self.weights.append(weight)

    def sum(self, world: Group) -> None:
        """Sum the gradients at their owners, and send the sums to all who have the weights."""
        if self.exchange is None:
            self.exchange = Exchange(world, self.routes, "gradients")
        grads = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in self.weights]
        for weight, grad in zip(self.weights, self.exchange.spread(self.exchange.collect(grads)), strict=True):
            weight.grad = grad


_B = TypeVar("_B", _Bucket, _Divided)


def _last(batches: list[_B], kind: type[_B], dtype: torch.dtype, nbytes: int) -> _B:
    """The last batch if so many bytes still fit, else a new one; a batch is of one type of numbers."""
    if not batches or batches[-1].nbytes + nbytes > _BUCKET_BYTES or batches[-1].dtype != dtype:
        batches.append(kind(dtype=dtype))
    batches[-1].nbytes += nbytes
    return batches[-1]
