"""Detection of losses that the program begins to compute in another way, as from some epoch on.

The kind of a loss is the set of operations at the end of its autograd graph, which takes some 25 microseconds to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_NODES = 64
"""Largest number of operations of a graph that count, those next to the loss first."""
_KINDS = 32
"""Number of kinds after which no further one counts: such a program chooses its operations by its data."""
_ENTRANCES = ("backward", "grad")
"""Functions of `torch.autograd` that differentiate; `Tensor.backward` calls the first one."""


class LossGraphs:
    """The kinds of losses that this process has differentiated."""

    def __init__(self) -> None:
        self._kinds: set[frozenset[str]] = set()
        self._has_new = False
        self._original: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        """Look at all losses from now on."""
        if not self._original:
            for name in _ENTRANCES:
                self._original[name] = getattr(torch.autograd, name)
                setattr(torch.autograd, name, self._watched(self._original[name]))

    def end(self) -> None:
        """Stop looking."""
        for name, original in self._original.items():
            setattr(torch.autograd, name, original)
        self._original.clear()

    def take_new(self) -> bool:
        """Return whether there was a loss of a new kind since the last call."""
        has_new, self._has_new = self._has_new, False
        return has_new

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self._kinds) < _KINDS:
                self._add(kind_of([tensors] if isinstance(tensors, Tensor) else tensors))
            return original(tensors, *args, **kwargs)

        return watched

    def _add(self, kind: frozenset[str]) -> None:
        self._has_new |= kind not in self._kinds
        self._kinds.add(kind)


def kind_of(losses: Iterable[Any]) -> frozenset[str]:
    """Return the names of the operations next to `losses`, with what they do to a batch (a mean or a sum)."""
    nodes: list[Any] = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    known, names = set(nodes), set[str]()
    for node in nodes:  # which grows
        names.add(f"{node.name()} {getattr(node, '_saved_reduction', '')}")
        if len(nodes) < _NODES:
            following = {one: None for one, _ in node.next_functions if one is not None and one not in known}
            known.update(following)
            nodes += following
    return frozenset(names)
