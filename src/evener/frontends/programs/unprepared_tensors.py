"""Tensors of a user's program that belong to no prepared model and differ between nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from evener.data.alike import print_of
from evener.records.errors import is_users
from evener.training.differences import as_real

_MAX_ELEMENTS = 10_000
"""Elements of a tensor that are compared."""


def outside_prints(models: Sequence[nn.Module]) -> dict[str, float]:
    """Return a number for every tensor and module of the program outside `models`, by its name.

    Args:
        models: that nodes train together.
    """
    known = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
    prints: dict[str, float] = {}
    for name, value in _values(sys._getframe(1)):
        tensors = [tensor for tensor in _tensors(value) if id(tensor) not in known]
        if tensors and name not in prints:
            prints[name] = print_of([_sampled(tensor) for tensor in tensors])
    return prints


def differing(first: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Return the names of tensors that two nodes have with different values."""
    return [name for name, value in first.items() if name in other and not _is_close(value, other[name])]


def _is_close(value: float, other: float) -> bool:
    both_nan = value != value and other != other
    return both_nan or abs(value - other) <= 1e-9 * max(abs(value), abs(other))


def _values(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's active functions, the innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if name.startswith("__"):
                    continue
                yield name, value
                if not isinstance(value, Tensor | nn.Module | type) and type(value).__module__ == "__main__":
                    yield from ((f"{name}.{key}", one) for key, one in getattr(value, "__dict__", {}).items())
        frame = frame.f_back


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, list | tuple) and len(value) < 100:
        return [one for one in value if isinstance(one, Tensor)]
    return [value] if isinstance(value, Tensor) else []


def _sampled(tensor: Tensor) -> Tensor:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not is_number or tensor.is_sparse or tensor.is_meta:
        return torch.zeros(0)
    flat = as_real(tensor.detach()).flatten()
    return flat[:: -(-len(flat) // _MAX_ELEMENTS) or 1]
