"""Copies of models whose functions refer to the copies; `copy.deepcopy` ignores hooks and a replaced `forward`."""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks"),
)


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of `model`.

    Args:
        model: The model; it does not change.
        memo: Replacements by id; afterwards it also maps everything that was copied.
    """
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for held in (vars(module), *(getattr(module, name) for name in _HOOKS)):
            for key in [key for key, value in held.items() if isinstance(value, FunctionType)]:
                held[key] = rebound(held[key], memo)
    return twin


def rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function like `function` that refers to copies of the modules and tensors in its closure.

    Without such references it is `function` itself. Other references, such as lists and counters, are shared.
    """
    if not isinstance(function, FunctionType) or not _refers_to_copy(function, memo, set()):
        return function
    if id(function) in memo:
        return memo[id(function)]
    cells = function.__closure__ or ()
    others = tuple(
        CellType() if any(_refers_to_copy(value, memo, set()) for value in _held(cell)) else cell for cell in cells
    )
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, others)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(vars(function))
    memo[id(function)] = made  # it may refer to itself
    for cell, other in zip(cells, others, strict=True):
        if other is not cell:
            other.cell_contents = _in_copy(cell.cell_contents, memo)
    return made


def _held(cell: CellType) -> list[Any]:
    """Return the content of a cell, if it has any."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _refers_to_copy(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Return whether `value` is a copied module or tensor, or a function or method that refers to one."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        return id(value) in memo
    if isinstance(value, MethodType):
        return _refers_to_copy(value.__self__, memo, seen)
    if not isinstance(value, FunctionType):
        return False
    return any(_refers_to_copy(one, memo, seen) for cell in value.__closure__ or () for one in _held(cell))


def _in_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of `value`, which refers to something that was copied."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _in_copy(value.__self__, memo))
    return rebound(value, memo) if isinstance(value, FunctionType) else memo[id(value)]
