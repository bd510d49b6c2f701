"""Gradients are sums: that of a weight is the sum of what all ranks that hold it have computed.

    sum_bucket        of DistributedDataParallel's buckets: every rank has the whole model (`replicated.py`)
    GradientSums      during backward, of a model whose layers are divided (`divided.py`)
    GradientBucket    of some weights over some ranks, when asked to: what stages and their replicas share (`pipeline/`)

The loss is a sum: a rank's loss is the sum over its samples divided by the number of samples of the *whole* batch.
Gradients then add up to those of one process, whatever the shares; nothing is averaged over ranks afterwards.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import holders, owners
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.process_mesh import ProcessMesh

_BUCKET_BYTES = 25 * 2**20


def sum_bucket(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """A hook of DistributedDataParallel: sum one bucket over the ranks; after the last one this rank only waits."""
    if bucket.is_last():
        group.timer.pause(before_update=True)
    else:
        group.timer.break_for_others()
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, group=group.process_group, async_op=True)
    group.count_all_reduce(buffer, "gradients")
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


class GradientBucket:
    """Weights whose gradients travel together in one all-reduce over `group`."""

    def __init__(self, group: Group) -> None:
        self.weights: list[nn.Parameter] = []
        self.nbytes = 0
        self._group = group
        self._factors: list[float] = []
        self._flat = torch.empty(0)
        self._work: dist.Work | None = None

    def add(self, weight: nn.Parameter, nbytes: int, factor: float = 1.0) -> None:
        """Let `weight` travel, too; its gradient of `nbytes` counts `factor` times in the sum."""
        self.weights.append(weight)
        self._factors.append(factor)
        self.nbytes += nbytes

    def start(self) -> None:
        """Start to sum; a weight that the loss did not depend on counts as zeros."""
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        parts = [g.flatten() if f == 1 else g.flatten() * f for g, f in zip(grads, self._factors, strict=True)]
        self._flat = torch.cat(parts).detach()
        self._work = dist.all_reduce(self._flat, group=self._group.process_group, async_op=True)
        self._group.count_all_reduce(self._flat, "gradients")

    def finish(self) -> None:
        """Wait for the sum, and let every weight's gradient be its part of it."""
        assert self._work is not None
        self._work.wait()
        parts = torch.split(self._flat, [weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.grad = part.view_as(weight)
        self._work, self._flat = None, torch.empty(0)


class _DividedBucket:
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
        self._routes.append(replace(route, source=len(self.weights)))
        self.weights.append(weight)
        self.nbytes += nbytes

    def sum(self) -> None:
        """Sum the gradients at their owners, and send the sums to all who have the weights."""
        if self._exchange is None:
            self._exchange = Exchange(self._group, self._routes, "gradients")
        grads = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in self.weights]
        sums = self._exchange.all_gather(self._exchange.reduce_scatter(grads))
        for weight, grad in zip(self.weights, sums, strict=True):
            weight.grad = grad


_B = TypeVar("_B", GradientBucket, _DividedBucket)


class GradientSums:
    """Completes the gradients of a model's weights before `backward()` returns.

    Whole weights travel in buckets, from those used last in the forward pass to those used first, while backward goes
    on. The order of buckets is fixed, and backward runs in one order on all ranks, so they meet the same collectives in
    the same order. What is divided among the ranks of a replica is complete there, and summed over replicas at the end.

    Args:
        part: of the model, that this rank has.
        plans: what every replica does.
        mesh: of this rank.
    """

    def __init__(self, part: nn.Module, plans: Sequence[ReplicaPlan], mesh: ProcessMesh) -> None:
        self._part, self._plans, self._mesh, self._world = part, plans, mesh, mesh.world
        self._shards = plans[mesh.index].shards
        self._sums = True
        self._started = False
        self._launched = 0
        self._buckets: list[GradientBucket] = []
        self._divided: list[_DividedBucket] = []
        if self._world.size > 1:
            self._sort()
        self._missing: list[int] = []
        hooked: list[tuple[Any, int | None]] = [
            (w, i) for i, bucket in enumerate(self._buckets) for w in bucket.weights
        ]
        hooked += [(weight, None) for bucket in self._divided for weight in bucket.weights]
        for weight, bucket in hooked:
            weight.register_post_accumulate_grad_hook(partial(self._arrived, bucket=bucket))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients stay on this rank: for all but the last micro-batch of a step."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def clip(self, largest: float) -> float:
        """Shrink all gradients, if need be, so that those of the whole model have a norm of `largest`; the norm before.

        Every rank of the replica calls this after backward.
        """
        group = self._mesh.group
        counted = list(self._grads(divided_only=not group.is_leader))
        return clip_gradients(counted, list(self._grads()), largest, group.all_gather_bytes)

    def _grads(self, divided_only: bool = False) -> Iterator[Tensor]:
        """Gradients of this rank's weights, or only of those of which other ranks have other parts."""
        for name, weight in self._part.named_parameters():
            shard = self._shards.get(name)
            divided = shard is not None and shard.layout.state == "split"
            if weight.grad is not None and (divided or not divided_only):
                yield weight.grad

    def _sort(self) -> None:
        """Put the weights that ranks share into buckets, those that the forward pass uses last first."""
        several = len(self._plans) > 1
        for name, shard in reversed(self._shards.items()):
            if not shard.trainable:
                continue
            weight: nn.Parameter = operator.attrgetter(name)(self._part)
            whole = prod(shard.shape) * weight.element_size()  # the own part's size would make other buckets elsewhere
            if shard.layout.state == "split":
                if several:
                    layouts = [plan.shards[name].layout for plan in self._plans]
                    route = Route(owners(layouts, shard.shape), holders(layouts, shard.shape))
                    self._last(self._divided, _DividedBucket, weight, whole).add(weight, whole, route)
            elif shard.layout.state == "whole" or several:
                copies = self._mesh.group.size if shard.layout.state == "alike" else 1
                self._last(self._buckets, GradientBucket, weight, whole).add(weight, whole, 1 / copies)

    def _last(self, buckets: list[_B], kind: type[_B], weight: nn.Parameter, nbytes: int) -> _B:
        """The last bucket if so many bytes still fit, else a new one; a bucket is of one type of numbers."""
        last = buckets[-1] if buckets else None
        if last is None or last.nbytes + nbytes > _BUCKET_BYTES or last.weights[0].dtype != weight.dtype:
            last = kind(self._world)
            buckets.append(last)
        return last

    def _arrived(self, _: Tensor, bucket: int | None) -> None:
        """A weight's gradient is complete on this rank."""
        if not self._sums:
            return
        if not self._started:
            self._start()
        if bucket is not None:
            self._missing[bucket] -= 1
        while self._launched < len(self._buckets) and self._missing[self._launched] == 0:
            self._launch()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        self._missing = [len(bucket.weights) for bucket in self._buckets]
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _launch(self) -> None:
        self._world.timer.break_for_others()
        self._buckets[self._launched].start()
        self._launched += 1

    def _finish(self) -> None:
        """Wait for all buckets, then sum what is divided."""
        while self._launched < len(self._buckets):
            self._launch()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.finish()
        for divided in self._divided:
            divided.sum()


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


def clip_gradients(
    counted: Sequence[Tensor], grads: Sequence[Tensor], largest: float, gather: Callable[[bytes], list[bytes]]
) -> float:
    """Shrink `grads`, if need be, as `clip_grad_norm_` would those of the whole model; returns their norm before.

    Args:
        counted: those of this rank's gradients that no other rank counts.
        grads: all of this rank's.
        largest: norm that all gradients together may have.
        gather: the messages of all ranks that hold the model together.
    """
    own = float(nn.utils.get_total_norm(counted)) ** 2 if counted else 0.0
    norm = math.sqrt(sum(map(float, gather(repr(own).encode()))))
    if grads:
        torch._foreach_mul_(list(grads), min(1.0, largest / (norm + 1e-6)))
    return norm
