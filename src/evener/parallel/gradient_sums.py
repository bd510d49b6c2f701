"""Gradients are sums: that of a weight is the sum of what all ranks that hold it have computed.

    sum_bucket     of DistributedDataParallel's buckets: every rank has the whole model (`replicated.py`)
    ReplicaSums    likewise, where ranks may use different weights
    ReplicaMeans   likewise, in a program that calls `backward()` itself (`replica_means.py`)
    GradientSums   of a model whose layers are divided (`divided.py`)

The loss is a sum: a rank's loss is the sum over its samples divided by the number of samples of the *whole* batch.
Gradients then add up to those of one process, whatever the shares; nothing is averaged over ranks afterwards.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.exchange import Route
from evener.comm.group import Group
from evener.oracle.division.layout import holders, owners
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.bucket_sums import BucketSums
from evener.parallel.gradient_buckets import (
    BUCKET_BYTES,
    DividedBucket,
    GradientBucket,
    flagged_buckets,
    last_bucket,
    sum_over,
)
from evener.parallel.process_mesh import ProcessMesh


def sum_bucket(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """A hook of DistributedDataParallel: sum one bucket over the ranks; after the last one this rank only waits."""
    if bucket.is_last():
        group.timer.pause(before_update=True)
    else:
        group.timer.break_for_others()
    return group.sum_later(bucket.buffer(), "gradients")


class GradientSums(BucketSums):
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
        self._part, self._plans, self._mesh = part, plans, mesh
        self._shards = plans[mesh.index].shards
        self._unplanned: list[nn.Parameter] = []
        super().__init__(mesh.world, *(self._sorted() if mesh.world.size > 1 else ((), ())))

    def finish(self) -> None:
        """Besides, sum gradients of weights that the plans do not know: every rank of a replica has all of them."""
        super().finish()
        met = [weight for weight in self._unplanned if weight.grad is not None]
        for weight in met:
            assert weight.grad is not None
            weight.grad /= self._mesh.group.size
        sum_over(self._world, met)

    def _start(self) -> None:
        super()._start()
        self._finish_with_backward()

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

    def _sorted(self) -> tuple[list[GradientBucket], list[DividedBucket]]:
        """The weights that ranks share in buckets, those that the forward pass uses last first."""
        buckets: list[GradientBucket] = []
        divided: list[DividedBucket] = []
        several = len(self._plans) > 1
        others = {id(weight): weight for weight in self._part.parameters() if weight.requires_grad}
        for name, shard in reversed(self._shards.items()):
            weight: Any = operator.attrgetter(name)(self._part)
            if others.pop(id(weight), None) is None:  # a buffer, or tied to one before
                continue
            whole = (
                math.prod(shard.shape) * weight.element_size()
            )  # the own part's size would make other buckets elsewhere
            if shard.layout.state == "split":
                if several:
                    layouts = [plan.shards[name].layout for plan in self._plans]
                    route = Route(owners(layouts, shard.shape), holders(layouts, shard.shape))
                    last_bucket(divided, DividedBucket(self._mesh.world), weight, whole).add(weight, whole, route)
            elif shard.layout.state == "whole" or several:
                copies = self._mesh.group.size if shard.layout.state == "alike" else 1
                last_bucket(buckets, GradientBucket(self._mesh.world), weight, whole).add(weight, whole, 1 / copies)
        self._unplanned = list(others.values())
        return buckets, divided


class ReplicaSums(BucketSums):
    """Sums gradients of replicas that may use different weights in a step, or some of them never; call `finish`.

    Args:
        model: on every rank.
        world: the ranks.
        most: part of all gradients that travels together, at most: of a small model, too, some travel early.
    """

    def __init__(self, model: nn.Module, world: Group, most: float = 1.0) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        largest = min(BUCKET_BYTES, most * sum(parameter.nbytes for parameter in trained))
        super().__init__(world, flagged_buckets(trained, world, largest=largest))


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
