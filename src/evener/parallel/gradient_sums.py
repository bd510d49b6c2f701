"""Gradients are sums: that of a weight is the sum of what all ranks that hold it have computed.

    sum_bucket     of DistributedDataParallel's buckets: every rank has the whole model (`replicated.py`)
    ReplicaSums    likewise, where ranks may use different weights
    ReplicaMeans   likewise, in a program that calls `backward()` itself, however often
    GradientSums   of a model whose layers are divided (`divided.py`)

The loss is a sum: a rank's loss is the sum over its samples divided by the number of samples of the *whole* batch.
Gradients then add up to those of one process, whatever the shares; nothing is averaged over ranks afterwards.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.exchange import Route
from evener.comm.group import Group
from evener.oracle.division.layout import holders, owners
from evener.oracle.division.plan import ReplicaPlan
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


class _BucketSums:
    """Sums gradients in buckets while backward goes on, one bucket after the other: all ranks have the same ones."""

    def __init__(self, world: Group, buckets: Sequence[GradientBucket], divided: Sequence[DividedBucket] = ()) -> None:
        self._world, self._divided = world, divided
        self._sums = True
        self._started = False
        self._launched = 0
        self._missing: list[int] = []
        self._arrange(buckets)
        hooked: list[Any] = [weight for bucket in buckets for weight in bucket.weights]
        hooked += [weight for bucket in divided for weight in bucket.weights]
        arrived = _weakly(self._arrived)
        for weight in hooked:
            weight.register_post_accumulate_grad_hook(arrived)

    def _arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """From now on these are the buckets."""
        self._buckets = buckets
        self._bucket_of = {id(weight): i for i, bucket in enumerate(buckets) for weight in bucket.weights}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients stay on this rank: for all but the last micro-batch of a step."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def _arrived(self, weight: Tensor) -> None:
        """A weight's gradient is complete on this rank."""
        if not self._sums:
            return
        if not self._started:
            self._start()
        bucket = self._bucket_of.get(id(weight))
        if bucket is not None:
            self._missing[bucket] -= 1
        while self._launched < len(self._buckets) and self._missing[self._launched] == 0:
            self._launch()

    @property
    def has_started(self) -> bool:
        """Whether a backward pass has begun whose gradients are not complete."""
        return self._started

    def begin(self) -> None:
        """A backward pass begins; of a rank that has no part of any weight, no gradient would tell."""
        if self._sums and not self._started:
            self._start()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        self._missing = [len(bucket.weights) for bucket in self._buckets]

    def _finish_with_backward(self) -> None:
        """Everything is complete before the `backward()` returns that goes on now."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.finish() if self._started else None)

    def _launch(self) -> None:
        self._world.timer.break_for_others()
        self._buckets[self._launched].start()
        self._launched += 1

    def forget(self) -> None:
        """The step was not finished: the next gradient that arrives is the first of another."""
        self._started, self._sums = False, True
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Wait for all buckets, then sum what is divided."""
        if not self._started:
            self._start()
        while self._launched < len(self._buckets):
            self._launch()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.finish()
        for divided in self._divided:
            divided.sum()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`method`, without keeping its object: Python's collector cannot free a weight whose hook refers back to it."""
    known = WeakMethod(method)

    def call(weight: Tensor) -> None:
        living = known()
        assert living is not None, "weights are trained that outlived the model they are of"
        living(weight)

    return call


class GradientSums(_BucketSums):
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


class ReplicaSums(_BucketSums):
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


class ReplicaMeans(_BucketSums):
    """Averages gradients of replicas that a program of the user's trains: complete whenever `backward()` returns.

    Before it is added to what is there, a gradient is multiplied by the rank's `weight`: by p n / N for n of N samples
    on p ranks, the means are those of the whole batch. What all ranks have alike stays as it is, so it does not matter
    how often a step calls `backward()`, nor whether weights are penalised. Weights may be frozen and thawed.

    Args:
        model: on every rank.
        world: the ranks.
        weight: of this rank's part of the batch that is computed now.
        completed: called when gradients are complete.

    Attributes:
        watch: if set, it is called when a rank's own gradients are complete (False), which are not sent before, and
            when the means are (True).
    """

    def __init__(
        self, model: nn.Module, world: Group, weight: Callable[[], float], completed: Callable[[], None]
    ) -> None:
        self._trainable: list[Any] = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
        self._weight, self._completed = weight, completed
        self.watch: Callable[[bool], None] | None = None
        super().__init__(world, ())
        for parameter in self._trainable:
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one takes no hook
            parameter.register_hook(self._weighed)
            parameter.register_post_accumulate_grad_hook(self._arrived)
            parameter.requires_grad_(is_trained)

    def _weighed(self, gradient: Tensor) -> Tensor:
        """What is not there counts as zeros, also if it is no number."""
        weight = self._weight()
        return gradient if weight == 1 else gradient * weight if weight else torch.zeros_like(gradient)

    def own_gradients(self) -> Tensor:
        """This rank's gradients, unweighted, in one piece of float64; zeros where there is none."""
        weight = self._weight()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._trainable]
        flat = torch.cat([grad.detach().double().cpu().flatten() for grad in found])
        return flat / weight if weight else flat

    def _start(self) -> None:
        trained = [parameter for parameter in self._trainable if parameter.requires_grad]
        if len(trained) != len(self._bucket_of) or any(id(weight) not in self._bucket_of for weight in trained):
            self._arrange(flagged_buckets(trained, self._world, averaged=True))
        super()._start()
        if self.watch is not None:
            self._missing = [len(self._trainable) + 1] * len(self._buckets)
        self._finish_with_backward()

    def finish(self) -> None:
        """Besides, the user's hooks on gradients are run."""
        if self.watch is not None:
            self.watch(False)
        super().finish()
        if self.watch is not None:
            self.watch(True)
        self._completed()


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
