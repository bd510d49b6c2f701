"""Sums of gradients over the ranks that hold a weight.

    sum_bucket     sums a bucket of DistributedDataParallel; every rank has the whole model (`replicated.py`)
    ReplicaSums    sums gradients where ranks may use different weights
    ReplicaMeans   averages gradients in a program that calls `backward()` itself (`replica_means.py`)
    GradientSums   sums gradients of a model with sharded layers (`divided.py`)

A rank's loss is the sum over its samples divided by the number of samples of the *whole* batch. The gradients then add
up to those of a single process for any shares, and nothing is averaged over ranks afterwards.
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
    """Sum one bucket over the ranks, as a hook of DistributedDataParallel. After the last one this rank only waits."""
    if bucket.is_last():
        group.timer.pause(before_update=True)
    else:
        group.timer.break_for_others()
    return group.sum_later(bucket.buffer(), "gradients")


class GradientSums(BucketSums):
    """Complete the gradients of a model's weights before `backward()` returns.

    Whole weights are reduced in buckets during backward, from the last one of the forward pass to the first. The order
    of buckets is fixed and backward runs in the same order on all ranks, so their collectives match. Gradients of
    weights that the ranks of a replica divide are complete in the replica, and are summed over replicas at the end.

    Args:
        part: This rank's part of the model.
        plans: The plan of every replica.
        mesh: The position of this rank.
    """

    def __init__(self, part: nn.Module, plans: Sequence[ReplicaPlan], mesh: ProcessMesh) -> None:
        self._part, self._plans, self._mesh = part, plans, mesh
        self._shards = plans[mesh.index].shards
        self._unplanned: list[nn.Parameter] = []
        super().__init__(mesh.world, *(self._sorted() if mesh.world.size > 1 else ((), ())))

    def finish(self) -> None:
        """Finish the sums, then sum gradients of unplanned weights, which every rank of a replica has."""
        super().finish()
        unplanned = [weight for weight in self._unplanned if weight.grad is not None]
        for weight in unplanned:
            assert weight.grad is not None
            weight.grad /= self._mesh.group.size
        sum_over(self._world, unplanned)

    def _start(self) -> None:
        super()._start()
        self._finish_with_backward()

    def clip(self, largest: float) -> float:
        """Scale all gradients so that the whole model's norm is at most `largest`; return the norm before.

        Every rank of the replica calls this after backward.
        """
        group = self._mesh.group
        counted = list(self._grads(divided_only=not group.is_leader))
        return clip_gradients(counted, list(self._grads()), largest, group.all_gather_bytes)

    def _grads(self, divided_only: bool = False) -> Iterator[Tensor]:
        """Iterate over gradients of this rank's weights, or only of the divided ones."""
        for name, weight in self._part.named_parameters():
            shard = self._shards.get(name)
            divided = shard is not None and shard.layout.state == "split"
            if weight.grad is not None and (divided or not divided_only):
                yield weight.grad

    def _sorted(self) -> tuple[list[GradientBucket], list[DividedBucket]]:
        """Return buckets of the weights that ranks share; the last weights of the forward pass come first."""
        buckets: list[GradientBucket] = []
        divided: list[DividedBucket] = []
        several = len(self._plans) > 1
        others = {id(weight): weight for weight in self._part.parameters() if weight.requires_grad}
        for name, shard in reversed(self._shards.items()):
            weight: Any = operator.attrgetter(name)(self._part)
            if others.pop(id(weight), None) is None:  # a buffer, or tied to one before
                continue
            whole = math.prod(shard.shape) * weight.element_size()  # the size of a part would differ between ranks
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
    """Sum gradients of replicas that may use different weights in a step, or some weights never. Call `finish`.

    Args:
        model: The model, on every rank.
        world: The ranks.
        largest_share: Largest share of all gradients in one bucket, so that a small model also starts reducing early.
    """

    def __init__(self, model: nn.Module, world: Group, largest_share: float = 1.0) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        largest = min(BUCKET_BYTES, largest_share * sum(parameter.nbytes for parameter in trained))
        super().__init__(world, flagged_buckets(trained, world, largest=largest))


def clip_gradients(
    counted: Sequence[Tensor], grads: Sequence[Tensor], largest: float, gather: Callable[[bytes], list[bytes]]
) -> float:
    """Scale `grads` as `clip_grad_norm_` would scale the whole model's gradients; return their norm before.

    Args:
        counted: This rank's gradients that no other rank counts.
        grads: All of this rank's gradients.
        largest: Largest norm of all gradients together.
        gather: Gathers the messages of all ranks that hold the model together.
    """
    squared_norm = float(nn.utils.get_total_norm(counted)) ** 2 if counted else 0.0
    norm = math.sqrt(sum(map(float, gather(repr(squared_norm).encode()))))
    if grads:
        torch._foreach_mul_(list(grads), min(1.0, largest / (norm + 1e-6)))
    return norm
