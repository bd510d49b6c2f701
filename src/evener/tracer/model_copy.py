"""Copies of models whose functions know the copies: `copy.deepcopy` copies neither hooks nor a replaced `forward`."""

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
    """A copy of `model`.

    Args:
        model: stays as it is.
        memo: by id, what takes the place of what; afterwards of all that was copied.
    """
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for held in (vars(module), *(getattr(module, name) for name in _HOOKS)):
            for key in [key for key, value in held.items() if isinstance(value, FunctionType)]:
                held[key] = rebound(held[key], memo)
    return twin


def rebound(function: Any, memo: dict[int, Any]) -> Any:
    """A function like `function` that knows copies of the modules and tensors in its closure; itself if there are none.

    Whatever else it knows (lists, counters) it shares with the original.
    """
    if not isinstance(function, FunctionType) or not _knows(function, memo, set()):
        return function
    if id(function) in memo:
        return memo[id(function)]
    cells = function.__closure__ or ()
    others = tuple(CellType() if any(_knows(value, memo, set()) for value in _held(cell)) else cell for cell in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, others)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(vars(function))
    memo[id(function)] = made  # it may know itself
    for cell, other in zip(cells, others, strict=True):
        if other is not cell:
            other.cell_contents = _in_copy(cell.cell_contents, memo)
    return made


def _held(cell: CellType) -> list[Any]:
    """What is in a cell, if anything is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _knows(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Whether `value` is a module or tensor that was copied, or a function or method that knows one."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        return id(value) in memo
    if isinstance(value, MethodType):
        return _knows(value.__self__, memo, seen)
    if not isinstance(value, FunctionType):
        return False
    return any(_knows(one, memo, seen) for cell in value.__closure__ or () for one in _held(cell))


def _in_copy(value: Any, memo: dict[int, Any]) -> Any:
    """What `value`, which knows something that was copied, is in the copy."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _in_copy(value.__self__, memo))
    return rebound(value, memo) if isinstance(value, FunctionType) else memo[id(value)]
