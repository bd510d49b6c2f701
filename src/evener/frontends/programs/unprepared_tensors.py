"""Tensors of a user's program that belong to no prepared model and differ between nodes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.records.decoding import decode_json
from evener.records.errors import is_users
from evener.training.differences import as_real

_MAX_ELEMENTS = 10_000
"""Elements of a tensor that are compared."""
_MAX_TENSORS = 100
"""Tensors of a container that are compared."""
_ALIKE = 1e-6
"""Largest relative difference of weights that nodes compute alike, by rounding."""
_CONTAINERS = (list, tuple, deque, dict)


class Outside(NamedTuple):
    """A tensor, a module or a container of tensors of the program that is in no model.

    Attributes:
        print: a number that depends on its values.
        places: of its tensors in memory.
        is_container: whether it is a container, which may be empty.
    """

    print: float
    places: tuple[int, ...]
    is_container: bool


class UnpreparedWeights:
    """Weights that are changed by optimizers which the program has not prepared.

    Args:
        prepared: returns the prepared optimizers.
    """

    def __init__(self, prepared: Callable[[], Sequence[Optimizer]]) -> None:
        self._prepared = prepared
        self._weights: dict[int, ReferenceType[Tensor]] = {}
        self._handle: Any = None

    def begin(self) -> None:
        """Look at the steps of all optimizers from now on."""
        self._handle = self._handle or register_optimizer_step_post_hook(self._stepped)

    def end(self, group: Group) -> str:
        """Stop looking; return a sentence if weights that still exist differ between the ranks, which all call this."""
        if self._handle is not None:
            self._handle.remove()
        weights = [weight for reference in self._weights.values() if (weight := reference()) is not None]
        prints = msgspec.json.encode([print_of([_sampled(weight)]) for weight in weights])
        rows = [decode_json(row) for row in group.all_gather_bytes(prints)]
        if len({len(row) for row in rows}) > 1 or np.allclose(rows, rows[0], rtol=_ALIKE, atol=0.0, equal_nan=True):
            return ""
        return (
            "an optimizer that run.prepare does not know has made different weights on the nodes: prepare it, or "
            "combine what it learns from by evener.gather"
        )

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if all(optimizer is not one for one in self._prepared()):
            for group in optimizer.param_groups:
                self._weights.update({id(weight): ref(weight) for weight in group["params"]})


def outside_tensors(models: Sequence[nn.Module], handed: Sequence[Tensor] = ()) -> dict[str, Outside]:
    """Return every tensor, module and container of tensors of the program outside `models`, by its name.

    Args:
        models: that nodes train together.
        handed: tensors of batches, which differ between nodes as they have to.
    """
    with torch._C.DisableTorchFunction():  # what is compared here is not computed by the program
        return _outside(sys._getframe(1), models, handed)


def _outside(frame: FrameType, models: Sequence[nn.Module], handed: Sequence[Tensor]) -> dict[str, Outside]:
    known = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
    known |= {id(tensor) for tensor in handed}
    found: dict[str, Outside] = {}
    for name, value in _values(frame):
        tensors = [tensor for tensor in _tensors(value) if id(tensor) not in known]
        is_container = isinstance(value, _CONTAINERS)
        if (tensors or (is_container and not value)) and name not in found:
            number = print_of([_sampled(tensor) for tensor in tensors]) if tensors else 0.0
            found[name] = Outside(number, tuple(tensor.data_ptr() for tensor in tensors), is_container)
    return found


def by_likelihood(before: Mapping[str, Outside], after: Mapping[str, Outside]) -> list[str]:
    """Return the names of `after`: tensors that the program changed in place, then new ones, then containers."""

    def rank(name: str) -> int:
        if after[name].is_container:
            return 2
        return 0 if name in before and before[name].places == after[name].places else 1

    return sorted(after, key=rank)


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
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        items = [part for one in islice(value, _MAX_TENSORS) for part in (one if isinstance(one, tuple) else (one,))]
        return [one for one in items if isinstance(one, Tensor)]
    return [value] if isinstance(value, Tensor) else []


def _sampled(tensor: Tensor) -> Tensor:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not is_number or tensor.is_sparse or tensor.is_meta:
        return torch.zeros(0)
    flat = as_real(tensor.detach()).flatten()
    return flat[:: -(-len(flat) // _MAX_ELEMENTS) or 1]
