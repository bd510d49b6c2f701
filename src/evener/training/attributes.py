"""Attributes of models, losses and optimizers that change during training and that no state dict holds: counters in
Python, for example. Checkpoints hold them, and nodes that join an elastic run receive them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.tracer.effects import MODULE_ATTRIBUTES

_MAX_WHOLE_NUMBER = 2**63
"""JSON holds smaller whole numbers."""

Owners = Mapping[str, object]
"""Objects whose attributes are kept, by their name in a checkpoint."""


class _Seen(NamedTuple):
    """A tensor, and the number of its changes then."""

    tensor: ReferenceType[Tensor]
    version: int


def owners_of(model: nn.Module | None, loss: Any, optimizer: Optimizer) -> Owners:
    """Return the objects of a training that may count or remember something in attributes.

    Args:
        model: None if this rank has parts of it, whose attributes tracing has fixed.
        loss: function, method or module.
        optimizer: the user's.
    """
    keeper = inspect.unwrap(loss)
    keeper = keeper.__self__ if isinstance(keeper, MethodType) else keeper
    owners = {**_modules("model", model), "optimizer": optimizer}
    return owners | (_modules("loss", keeper) if isinstance(keeper, nn.Module) else {"loss": keeper})


class Attributes:
    """The numbers, texts and flags of a training's objects that have changed since it began.

    Args:
        owners: the objects, before the first step.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners, self._initial = owners, _plain_attributes(owners)
        self._tensors = {name: _Seen(ref(one), one._version) for name, one in _tensor_attributes(owners).items()}

    def rebind(self, owners: Owners) -> None:
        """Take these objects from now on."""
        self._owners = owners

    def changed(self) -> dict[str, Any]:
        """Return the attributes that have other values than before the first step, as `owner.attribute`."""
        missing = object()
        now = _plain_attributes(self._owners)
        return {name: value for name, value in now.items() if not _is_same(self._initial.get(name, missing), value)}

    def unsaved(self) -> list[str]:
        """Return the tensors that changed beside attributes that `changed` returns, and that no state dict holds.

        A module that counts what it keeps in such a tensor would resume with the count alone.
        """
        owners = {name.rpartition(".")[0] for name in self.changed()}
        now = _tensor_attributes({name: one for name, one in self._owners.items() if name in owners})
        return sorted(name for name, tensor in now.items() if not _is_unchanged(self._tensors.get(name), tensor))

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the attributes that `changed` returned in another process."""
        restore_attributes(self._owners, values)


def restore_attributes(owners: Owners, values: Mapping[str, Any]) -> None:
    """Set the attributes `values` of `owners`; those of objects that a model does not have any more are left out."""
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        if owner in owners:
            setattr(owners[owner], attribute, value)


def _modules(name: str, model: nn.Module | None) -> dict[str, object]:
    return {} if model is None else dict(model.named_modules(prefix=name))


def _plain_attributes(owners: Owners) -> dict[str, Any]:
    return {
        f"{owner}.{name}": value.item() if isinstance(value, np.generic) else value
        for owner, one in owners.items()
        for name, value in getattr(one, "__dict__", {}).items()
        if name not in MODULE_ATTRIBUTES and _is_plain(value)
    }


def _tensor_attributes(owners: Owners) -> dict[str, Tensor]:
    return {
        f"{owner}.{name}": value
        for owner, one in owners.items()
        for name, value in getattr(one, "__dict__", {}).items()
        if name not in MODULE_ATTRIBUTES and isinstance(value, Tensor)
    }


def _is_unchanged(seen: _Seen | None, tensor: Tensor) -> bool:
    return seen is not None and seen.tensor() is tensor and seen.version == tensor._version


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.generic):
        return isinstance(value.item(), bool | int | float)
    is_small = not isinstance(value, int) or abs(value) < _MAX_WHOLE_NUMBER
    return type(value) in (bool, int, float, str, type(None)) and is_small


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals itself."""
    return type(one) is type(other) and (one == other or (one != one and other != other))
