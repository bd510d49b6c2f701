"""Means of gradients over replicas, in a program of the user's that calls `backward()` itself, however often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from evener.comm.group import Group
from evener.comm.message_topics import gradients
from evener.parallel.bucket_sums import BucketSums
from evener.parallel.gradient_buckets import (
    flagged_buckets,
)


def _is_added(parameter: Tensor) -> bool:
    """Whether the backward pass that goes on adds a gradient to that of `parameter`."""
    node: Any = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # PyTorch does not say so of leaves in `autograd.grad`, which adds to none
        return False


class ReplicaMeans(BucketSums):
    """Averages gradients of replicas that a program of the user's trains: complete whenever `backward()` returns.

    Before it is added to what is there, a gradient is multiplied by the rank's `weight`: by p n / N for n of N samples
    on p ranks, the means are those of the whole batch. What all ranks have alike stays as it is, so it does not matter
    how often a step calls `backward()`, nor whether weights are penalised. Weights may be frozen and thawed.

    Args:
        model: on every rank.
        world: the ranks.
        weight: of this rank's part of the batch that is computed now.
        completed: called when gradients are complete.
        step: number of the step that goes on, by which ranks notice that one of them is in another.

    Attributes:
        watch: if set, it is called when a rank's own gradients are complete (False), which are not sent before, and
            when the means are (True).
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
        super().__init__(world, ())
        self.follow(model.parameters())

    def follow(self, parameters: Iterable[Any]) -> None:
        """Average the gradients of those, too."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._trainable.append(parameter)
            self._known.add(id(parameter))
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one takes no hook
            parameter.register_hook(partial(self._weighed, parameter))
            parameter.register_post_accumulate_grad_hook(self._arrived)
            parameter.requires_grad_(is_trained)

    def _weighed(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What is not there counts as zeros, also if it is no number; `autograd.grad` returns gradients as they are."""
        weight = self._weight()
        if weight == 1 or not _is_added(parameter):
            return gradient
        return gradient * weight if weight else torch.zeros_like(gradient)

    def averages(self, parameter: Tensor) -> bool:
        """Whether it is one of those whose gradients are averaged."""
        return id(parameter) in self._known

    def own_gradients(self) -> Tensor:
        """This rank's gradients, unweighted, in one piece of float64: complex ones as pairs, missing ones as zeros."""
        weight = self._weight()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._trainable]
        real = [torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad for grad in found]
        flat = torch.cat([grad.detach().double().cpu().flatten() for grad in real])
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
        topic = gradients(self._step())
        if self._world.process_group is None:  # gradients travel in the mesh, too, and have to arrive first
            super().finish()
            self._world.meet(topic)
        else:
            self._launch_all()
            self._world.meet(topic)  # before gradients are waited for, which those never send who are elsewhere
            super().finish()
        if self.watch is not None:
            self.watch(True)
        self._completed()
