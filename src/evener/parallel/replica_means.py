"""Means of gradients over replicas, for a user's program that calls `backward()` itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from evener.comm.group import Group
from evener.comm.message_topics import gradients
from evener.parallel.bucket_sums import BucketSums
from evener.parallel.gradient_buckets import flagged_buckets


def _is_added(parameter: Tensor) -> bool:
    """Return whether the current backward pass accumulates into the gradient of `parameter`."""
    node: Any = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for leaves in `autograd.grad`, which accumulates nothing
        return False


class ReplicaMeans(BucketSums):
    """Average gradients over the replicas that a user's program trains; they are complete when `backward()` returns.

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
    """

    def __init__(
        self,
        model: nn.Module,
        world: Group,
        weight: Callable[[], float],
        completed: Callable[[], None],
        step: Callable[[], int] = int,
    ) -> None:
        self._trainable: list[Any] = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
        self._weight, self._completed, self._step = weight, completed, step
        self.watch: Callable[[bool], None] | None = None
        super().__init__(world, ())
        for parameter in self._trainable:
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen parameter accepts no hook
            parameter.register_hook(partial(self._weighed, parameter))
            parameter.register_post_accumulate_grad_hook(self._arrived)
            parameter.requires_grad_(is_trained)

    def _weighed(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Multiply a gradient by the rank's weight.

        A rank of weight zero contributes zeros, even for NaN. `autograd.grad` returns gradients unchanged.
        """
        weight = self._weight()
        if weight == 1 or not _is_added(parameter):
            return gradient
        return gradient * weight if weight else torch.zeros_like(gradient)

    def own_gradients(self) -> Tensor:
        """Return this rank's unweighted gradients as one float64 tensor.

        Complex gradients are pairs of numbers, and missing ones are zeros.
        """
        weight = self._weight()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._trainable]
        real = [
            torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient for gradient in gradients
        ]
        flat = torch.cat([gradient.detach().double().cpu().flatten() for gradient in real])
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
