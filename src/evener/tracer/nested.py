"""Nested inputs and outputs of models: the tensors inside of tuples, lists and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.fx.immutable_collections import immutable_dict


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to everything in `value` that is not a tuple, list, dict or slice."""
    if isinstance(value, tuple):
        items = [map_values(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_values(item, function) for item in value]
    if isinstance(value, dict):
        made = dict(value) if isinstance(value, immutable_dict) else copy.copy(value)  # keeps the type
        for key, item in value.items():
            made[key] = map_values(item, function)
        return made
    if isinstance(value, slice):
        return slice(*(map_values(item, function) for item in (value.start, value.stop, value.step)))
    return function(value)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor in `value`."""
    return map_values(value, lambda item: function(item) if isinstance(item, Tensor) else item)


def values_in(value: Any) -> Iterator[Any]:
    """Yield everything in `value` that is not a tuple, list or dict, in order."""
    leaves: list[Any] = []
    map_values(value, leaves.append)
    yield from leaves


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, in order."""
    yield from (item for item in values_in(value) if isinstance(item, Tensor))


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """Call `function` with `inputs`: a tensor, a tuple or list of positional arguments, or a dict of named ones."""
    if isinstance(inputs, dict):
        return function(**inputs)
    if isinstance(inputs, tuple | list):
        return function(*inputs)
    return function(inputs)
