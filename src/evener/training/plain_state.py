"""States of optimisers, schedules and scalers as tensors and plain values, which files without pickle can hold.

flatten({0: {"step": 3, "exp_avg": T, "old_dirs": [A, B]}})
    -> {"0.exp_avg": T, "0.old_dirs#0": A, "0.old_dirs#1": B}, {"0.step": 3, "0.old_dirs": [None, None]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from evener.records.errors import TrainingFailed

_NOT_FINITE = "not finite"
"""Key of numbers that JSON has no word for."""


def flatten(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimiser's state, and its other values, by `<parameter index>.<name>`.

    Tensors of a list, as LBFGS keeps them, are `<parameter index>.<name>#<place>`; the list itself has None there.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, named in state.items():
        for name, value in named.items():
            key = f"{index}.{name}"
            if isinstance(value, Tensor):
                tensors[key] = (value.to_dense() if value.is_sparse else value).contiguous()
            elif isinstance(value, list | tuple):
                places = {f"{key}#{place}": one for place, one in enumerate(value) if isinstance(one, Tensor)}
                tensors |= {place: one.contiguous() for place, one in places.items()}
                values[key] = [None if isinstance(one, Tensor) else one for one in value]
            else:
                values[key] = value
    return tensors, values


def unflatten(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the state that `flatten` took."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*values.items(), *tensors.items()):
        index, name = key.split(".", 1)
        name, _, place = name.partition("#")
        entry = state.setdefault(int(index), {})
        if place:
            entry[name][int(place)] = value
        else:
            entry[name] = list(value) if isinstance(value, list) else value
    return state


def plain(value: Any, owner: str) -> Any:
    """Return `value` of `owner` as plain JSON values. Raise TrainingFailed if that is impossible."""
    try:
        return msgspec.json.decode(msgspec.json.encode(_finite(value), enc_hook=_number))
    except (TypeError, ValueError) as error:
        raise TrainingFailed(f"cannot write a checkpoint: the state of {owner} holds {error}") from error


def revived(value: Any) -> Any:
    """Return the value that `plain` took, with its non-finite numbers."""
    if isinstance(value, dict):
        if set(value) == {_NOT_FINITE}:
            return float(value[_NOT_FINITE])
        return {key: revived(one) for key, one in value.items()}
    return [revived(one) for one in value] if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """Return `value` with strings for non-finite numbers: JSON has none, and the best loss starts as one."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(value)}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__}, which is no plain value")
