"""Gradients of a model's whole weights, of which passes through divided layers give every rank a part.

They are complete, and the same on all ranks, whenever `backward()` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Means(Protocol):
    """What a run asks of the gradients of a model, however its work is divided.

    Attributes:
        watch: if set, it is called when a rank's own gradients are complete (False), where it has any that are sent,
            and when those of the whole batch are (True).
    """

    watch: Callable[[bool], None] | None

    def accumulating(self) -> Any:
        """A context in which gradients may stay on this rank."""

    def averages(self, parameter: Tensor) -> bool:
        """Whether its gradient is one of those."""

    def own_gradients(self) -> Tensor:
        """This rank's, unweighted, in one piece of float64."""


class LayerGradients:
    """Those of `model`, as `Means`.

    Args:
        model: whole, on every rank.
        collect: adds to its gradients what passes through divided layers came to, and says whether that is any.
        completed: called when gradients are complete.
    """

    def __init__(self, model: nn.Module, collect: Callable[[], bool], completed: Callable[[], None]) -> None:
        self.watch: Callable[[bool], None] | None = None
        self._collect, self._completed = collect, completed
        self._is_begun = self._has_arrived = False
        parameters: list[Any] = list(model.parameters())
        self._known = {id(parameter) for parameter in parameters}
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen one takes no hook
                parameter.register_post_accumulate_grad_hook(self._arrived)
                parameter.requires_grad_(is_trained)

    def begin(self) -> None:
        """A `backward()` goes on that adds to gradients: they are complete before it returns."""
        if not self._is_begun:
            self._is_begun = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """As `Means`: of a step that accumulates, every `backward()` brings whole gradients."""
        yield

    def averages(self, parameter: Tensor) -> bool:
        """As `Means`."""
        return id(parameter) in self._known

    def own_gradients(self) -> Tensor:
        """As `Means`: nothing, as no rank has gradients of samples of its own."""
        return torch.zeros(1, dtype=torch.float64)

    def _arrived(self, _: Tensor) -> None:
        """A whole weight has a gradient, of what every rank computes alike."""
        self._has_arrived = True
        self.begin()

    @torch.no_grad()
    def _finish(self) -> None:
        has_any = self._collect() or self._has_arrived
        self._is_begun = self._has_arrived = False
        if not has_any:  # such as of the inputs alone
            return
        self._completed()
        if self.watch is not None:
            self.watch(True)
