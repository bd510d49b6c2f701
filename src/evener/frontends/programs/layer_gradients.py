"""Gradients of whole weights, in a model whose layers the ranks divide.

Every rank has a part of them. They are complete, and the same on all ranks, when `backward()` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Means(Protocol):
    """A run's interface to the gradients of a model, for every division of the work.

    Attributes:
        watch: called, if set, with False when the local gradients are complete, before they are sent, and with True
            when those of the whole batch are.
    """

    watch: Callable[[bool], None] | None

    def accumulating(self) -> Any:
        """Return a context in which gradients may stay on this rank."""

    def averages(self, parameter: Tensor) -> bool:
        """Whether its gradient is one of those."""

    def own_gradients(self) -> Tensor:
        """Return this rank's unweighted gradients, flattened to float64."""


class LayerGradients:
    """The gradients of `model`, which are whole and equal on all ranks.

    Args:
        model: whole, on every rank.
        collect: adds the gradients of divided layers, and returns whether there were any.
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
        """Begin a `backward()` that adds to gradients, and complete them before it returns."""
        if not self._is_begun:
            self._is_begun = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a context without effect, because every `backward()` gives whole gradients."""
        yield

    def averages(self, parameter: Tensor) -> bool:
        """Return whether this object completes the gradient of `parameter`."""
        return id(parameter) in self._known

    def own_gradients(self) -> Tensor:
        """Return a zero, because no rank has gradients of its own samples."""
        return torch.zeros(1, dtype=torch.float64)

    def _arrived(self, _: Tensor) -> None:
        """Note a gradient of a weight that every rank computes alike."""
        self._has_arrived = True
        self.begin()

    @torch.no_grad()
    def _finish(self) -> None:
        has_any = self._collect() or self._has_arrived
        self._is_begun = self._has_arrived = False
        if not has_any:  # as when only inputs need gradients
            return
        self._completed()
        if self.watch is not None:
            self.watch(True)
