"""Sums of gradients over the ranks that hold a weight.

    sum_bucket     sums a bucket of DistributedDataParallel; every rank has the whole model (`replicated.py`)
    ReplicaSums    sums gradients where ranks may use different weights
    ReplicaMeans   averages gradients in a program that calls `backward()` itself
    GradientSums   sums gradients of a model with sharded layers (`sharded.py`)

A rank's loss is the sum over its samples divided by the number of samples of the *whole* batch. The gradients then add
up to those of a single process for any shares, and nothing is averaged over ranks afterwards.
"""

# Annotations are evaluated here, because DistributedDataParallel checks those of its communication hook.
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from evener.comm.exchange import Route
from evener.comm.group import Group
from evener.comm.message_topics import gradients
from evener.oracle.division.layout import holders, owners
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.gradient_buckets import (
    BUCKET_BYTES,
    GradientBucket,
    ShardedBucket,
    complete_unused,
    flagged_buckets,
    last_bucket,
    sum_over,
)
from evener.parallel.process_mesh import ProcessMesh
from evener.system import accelerators


class BucketSums:
    """Sums gradients during backward, one bucket after another. All ranks have the same buckets.

    Args:
        world: The ranks.
        buckets: Buckets of weights that every rank has.
        divided: Buckets of weights of which ranks have parts; these are summed last.
    """

    def __init__(self, world: Group, buckets: Sequence[GradientBucket], divided: Sequence[ShardedBucket] = ()) -> None:
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
        """Use these buckets from now on."""
        self._buckets = buckets
        self._bucket_of = {id(weight): i for i, bucket in enumerate(buckets) for weight in bucket.weights}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients on this rank: for all micro-batches of a step but the last."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def _arrived(self, weight: Tensor) -> None:
        """Note that a weight's gradient is complete on this rank, and start the buckets that are full."""
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
        """Whether a backward pass has started whose gradients are not complete."""
        return self._started

    def begin(self) -> None:
        """Start a backward pass, on a rank without a part of any weight, where no gradient triggers it."""
        if self._sums and not self._started:
            self._start()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        self._missing = [len(bucket.weights) for bucket in self._buckets]

    def _finish_with_backward(self) -> None:
        """Finish all sums before the current `backward()` returns."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.finish() if self._started else None)

    def _launch(self) -> None:
        self._world.timer.break_for_others()
        self._buckets[self._launched].start()
        self._launched += 1

    def _launch_all(self) -> None:
        if not self._started:
            self._start()
        while self._launched < len(self._buckets):
            self._launch()

    def forget(self) -> None:
        """Drop the unfinished step: the next gradient that arrives starts another one."""
        self._started, self._sums = False, True
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Wait for all buckets, then sum the divided weights."""
        self._launch_all()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.finish()
        for divided in self._divided:
            divided.sum()
        complete_unused([*self._buckets, *self._divided])


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return `method` without a reference to its object: a weight whose hook refers back to it would not be freed."""
    reference = WeakMethod(method)

    def call(weight: Tensor) -> None:
        living = reference()
        assert living is not None, "a weight is trained after its model was freed"
        living(weight)

    return call


def sum_bucket(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Sum one bucket over the ranks, as a hook of DistributedDataParallel. After the last one this rank only waits."""
    if bucket.is_last():
        group.timer.pause(before_update=True)
    else:
        group.timer.break_for_others()
    return group.sum_later(bucket.buffer(), "gradients")


class GradientSums(BucketSums):
    """Completes the gradients of a model's weights before `backward()` returns.

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

    def clip(self, largest: float) -> Tensor:
        """Scale all gradients so that the whole model's norm is at most `largest`; return the norm before, of no dims.

        Every rank of the replica calls this after backward.
        """
        group = self._mesh.group
        counted = list(self._grads(divided_only=not group.is_leader))
        return clip_gradients(
            counted, list(self._grads()), largest, group.device, partial(group.all_gather, kind="norms")
        )

    def _grads(self, divided_only: bool = False) -> Iterator[Tensor]:
        """Iterate over gradients of this rank's weights, or only of the divided ones."""
        for name, weight in self._part.named_parameters():
            shard = self._shards.get(name)
            divided = shard is not None and shard.layout.state == "split"
            if weight.grad is not None and (divided or not divided_only):
                yield weight.grad

    def _sorted(self) -> tuple[list[GradientBucket], list[ShardedBucket]]:
        """Return buckets of the weights that ranks share; the last weights of the forward pass come first."""
        buckets: list[GradientBucket] = []
        divided: list[ShardedBucket] = []
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
                    last_bucket(divided, ShardedBucket(self._mesh.world), weight, whole).add(weight, whole, route)
            elif shard.layout.state == "whole" or several:
                copies = self._mesh.group.size if shard.layout.state == "alike" else 1
                last_bucket(buckets, GradientBucket(self._mesh.world), weight, whole).add(weight, whole, 1 / copies)
        self._unplanned = list(others.values())
        return buckets, divided


class ReplicaSums(BucketSums):
    """Sums gradients of replicas that may use different weights in a step, or some weights never. Call `finish`.

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
    counted: Sequence[Tensor],
    grads: Sequence[Tensor],
    largest: float,
    device: torch.device,
    gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scale `grads` as `clip_grad_norm_` would scale the whole model's gradients; return their norm before, of no dims.

    The norm stays on a device with double precision, so the host does not wait for it.

    Args:
        counted: This rank's gradients that no other rank counts.
        grads: All of this rank's gradients.
        largest: Largest norm of all gradients together.
        device: That this rank computes on.
        gather: Returns the numbers of all ranks that hold the model together, of shape (ranks,), for this rank's own.
    """
    part = nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(gather(part.to(accelerators.exact(device), torch.float64)))
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for grad in grads:
        alike[grad.device, grad.dtype.to_real()].append(grad)
    for (place, dtype), scaled in alike.items():
        torch._foreach_mul_(scaled, scale.to(place, dtype))
    return norm


def is_added(parameter: Tensor) -> bool:
    """Return whether the current backward pass accumulates into the gradient of `parameter`."""
    if not parameter.requires_grad:  # it was frozen after the forward pass
        return False
    node: Any = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for leaves in `autograd.grad`, which accumulates nothing
        return False


class ReplicaMeans(BucketSums):
    """Averages gradients over the replicas of a user's program; they are complete when `backward()` returns.

    Each gradient is multiplied by the rank's `weight` before it is accumulated. With weight p n / N for n of N samples
    on p ranks, the means are those of the whole batch. Gradients that all ranks have alike stay unchanged. So a step
    may call `backward()` any number of times, weights may be penalised, and weights may be frozen and unfrozen.

    Args:
        model: The model, on every rank.
        world: The ranks.
        weight: Returns the weight of this rank's part of the current batch.
        completed: Called when gradients are complete.
        step: Returns the number of the current step. Ranks use it to notice that a rank is in another step.

    Attributes:
        watch: If set, called with False when a rank's local gradients are complete, and with True when the means are.
            Local gradients are not sent before the first call.
        observe: If set, called with a weight and each of this rank's gradients, unweighted, also of `autograd.grad`.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Group,
        weight: Callable[[], float],
        completed: Callable[[], None],
        step: Callable[[], int] = int,
    ) -> None:
        self._trainable: list[Any] = []
        self._known: set[int] = set()
        self._weight, self._completed, self._step = weight, completed, step
        self.watch: Callable[[bool], None] | None = None
        self.observe: Callable[[Tensor, Tensor], None] | None = None
        super().__init__(world, ())
        self.follow(model.parameters())

    def follow(self, parameters: Iterable[Any]) -> None:
        """Average the gradients of these parameters, too."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._trainable.append(parameter)
            self._known.add(id(parameter))
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen parameter accepts no hook
            parameter.register_hook(partial(self._weighed, parameter))
            parameter.register_post_accumulate_grad_hook(self._arrived)
            parameter.requires_grad_(is_trained)

    def _weighed(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Multiply a gradient by the rank's weight; weight zero gives zeros, even for NaN."""
        if self.observe is not None:
            self.observe(parameter, gradient)
        weight = self._weight()
        if weight == 1:
            return gradient
        if not is_added(parameter):
            return gradient
        if weight:
            return gradient * weight
        if gradient.requires_grad:  # of `backward(create_graph=True)`: the zeros keep their graph
            return gradient.masked_fill(torch.ones_like(gradient, dtype=torch.bool), 0.0)
        return torch.zeros_like(gradient)

    def averages(self, parameter: Tensor) -> bool:
        """Return whether the gradients of this parameter are averaged."""
        return id(parameter) in self._known

    def own_gradients(self) -> Tensor:
        """Return this rank's unweighted gradients as one float64 tensor; complex ones are pairs, missing ones zeros."""
        weight = self._weight()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._trainable]
        real = [
            torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient for gradient in gradients
        ]
        flat = torch.cat([gradient.detach().cpu().double().flatten() for gradient in real])
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
        """Complete the gradients, then run the user's gradient hooks."""
        if self.watch is not None:
            self.watch(False)
        topic = gradients(self._step())
        if self._world.process_group is None:  # the mesh also carries the gradients, which have to arrive first
            super().finish()
            self._world.meet(topic)
        else:
            self._launch_all()
            self._world.meet(topic)  # first, as ranks in another step never send gradients
            super().finish()
        if self.watch is not None:
            self.watch(True)
        self._completed()
