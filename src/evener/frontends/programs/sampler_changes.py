"""Comparison of the changes that a program makes to a loader's sampler, among the nodes.

Only the sampler of the first node yields batches. If a program tells its sampler the losses of this node's samples, the
first node's sampler misses those of the other nodes, and its batches differ from those of one process. The samplers of
the other nodes do not yield anything, so whatever changes in them was changed by the program. The same holds for what
the code of a sampler reads elsewhere: global variables, those of an enclosing function or of another module of the
user's, and attributes of the data set, also by `getattr` with a literal name.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidInput, is_users

_TOPIC = "the sampler's changes"
_DEPTH = 3
"""Attributes of attributes of a sampler that are compared."""
_LARGEST, _MOST = 1_000_000, 10_000
"""Numbers of one tensor that are compared (of a larger one, every second, third ... one), and items of a mixed list."""
_PLAIN: tuple[type, ...] = (Tensor, np.ndarray, np.generic, int, float, str, list, tuple, dict, set, deque)
_ATTRIBUTES, _GLOBALS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}), frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_IMPORTS = frozenset({"IMPORT_NAME"})


class SamplerChanges:
    """The attributes of a sampler at the beginning of a run.

    Args:
        batches: batch sampler of the user's loader.
        dataset: of that loader; only attributes that the code of the sampler reads are compared.
    """

    def __init__(self, batches: Any, dataset: Any) -> None:
        self._batches, self._dataset = batches, dataset
        self._first = self._prints()

    def require_same_changes(self, group: Group) -> None:
        """Compare what has changed since the beginning; all ranks call this.

        Raises:
            InvalidInput: the program changed the sampler of another node in another way than the first node's.
        """
        now = self._prints()
        changed = now if group.is_leader else {name: one for name, one in now.items() if one != self._first.get(name)}
        message = msgspec.msgpack.encode(changed)
        rows = [decode_msgpack(row, dict[str, float]) for row in group.all_gather_bytes(message, _TOPIC)]
        for rank, row in enumerate(rows[1:], start=1):
            for name, value in row.items():
                if not np.isclose(value, rows[0].get(name, np.nan), rtol=1e-9, atol=0.0):
                    raise InvalidInput(
                        f"the program changes `{name}`, from which its sampler makes batches, in one way on node "
                        f"{group.nodes[0]} and in another on node {group.nodes[rank]}; batches "
                        "then differ from those of one process: if a sampler learns from losses, give it those of "
                        "all nodes, by evener.gather"
                    )

    def _prints(self) -> dict[str, float]:
        return {name: _print(value) for name, value in self._values("", self._batches, _DEPTH)}

    def _values(
        self, name: str, value: Any, depth: int, read: frozenset[str] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of plain attributes of `value`, or `value` itself if it is plain.

        Args:
            name: of `value`.
            value: the sampler, or something that it reads.
            depth: how deep attributes of attributes are compared.
            read: names of the attributes to compare; None for all, and for those that the code of `value` reads.
        """
        if isinstance(value, _PLAIN):
            yield name or type(value).__name__, value
            return
        has_attributes = hasattr(value, "__dict__") and not callable(value)
        if not depth or not has_attributes or isinstance(value, nn.Module | ModuleType):
            return
        if read is None and self._is_data(value):
            return
        names, variables = (read, {}) if read is not None else _read_by(value)
        for attribute, item in vars(value).items():
            if read is None or attribute in read:
                below = names if read is not None or self._is_data(item) else None
                yield from self._values(f"{name}.{attribute}" if name else attribute, item, depth - 1, below)
        for variable, item in variables.items():
            yield from self._values(variable, item, depth - 1, names)

    def _is_data(self, value: Any) -> bool:
        """Whether `value` is a data set, which may cache samples: only attributes that a sampler reads matter."""
        return value is self._dataset or isinstance(value, Dataset)


def _read_by(sampler: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names of attributes in the code of a sampler, and the variables outside it that the code reads.

    Samplers of PyTorch read nothing outside. What only a constructor reads is no part of later batches.
    """
    classes = [cls for cls in type(sampler).__mro__ if not cls.__module__.startswith("torch.")]
    members = [member for cls in classes for name, member in vars(cls).items() if name != "__init__"]
    waiting = [function for member in (*members, *vars(sampler).values()) for function in _functions(member)]
    names, variables, seen = set[str](), dict[str, Any](), set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        here = _names(function.__code__, _GLOBALS)
        read = _names(function.__code__, _ATTRIBUTES) | (_texts(function.__code__) if "getattr" in here else set())
        names |= read
        around = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        outer = {name: function.__globals__[name] for name in here & function.__globals__.keys()}
        for name, cell in around:
            with suppress(ValueError):  # the variable has no value yet
                outer[name] = cell.cell_contents
        imported = {name: sys.modules.get(name) for name in _names(function.__code__, _IMPORTS)}
        for name, value in _variables({**imported, **outer}, read):
            if not isinstance(value, FunctionType):
                variables[name] = value
            elif is_users(value.__code__.co_filename):
                waiting.append(value)
    return frozenset(names), variables


def _variables(named: Mapping[str, Any], read: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield variables by name; of a module of the user's those that code reads, which are its attributes `read`."""
    waiting, seen = list(named.items()), set[str]()
    while waiting:
        name, value = waiting.pop()
        if not isinstance(value, ModuleType):
            yield name, value
        elif is_users(getattr(value, "__file__", None) or sys.prefix) and value.__name__ not in seen:
            seen.add(value.__name__)
            waiting += [(f"{name}.{attribute}", vars(value)[attribute]) for attribute in read & vars(value).keys()]


def _functions(member: Any) -> list[FunctionType]:
    """Return the functions of a class's member."""
    candidates = (member, getattr(member, "__func__", None), getattr(member, "fget", None))
    return [one for one in candidates if isinstance(one, FunctionType)]


def _texts(code: CodeType) -> set[str]:
    """Return the literal texts in `code` that can be names, and in the functions that it defines."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    return texts.union(*(_texts(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def _names(code: CodeType, operations: frozenset[str]) -> set[str]:
    """Return the names that these operations load, in `code` and in the functions that it defines."""
    here = {str(one.argval) for one in dis.get_instructions(code) if one.opname in operations}
    inner = [_names(constant, operations) for constant in code.co_consts if isinstance(constant, CodeType)]
    return here.union(*inner)


def _print(value: Any) -> float:
    """Return a number that differs for different values; 0.0 for one without numbers and texts."""
    if isinstance(value, deque):
        value = list(value)
    if isinstance(value, set):
        value = sorted(value, key=repr)
    if isinstance(value, dict):
        return _print(list(value)) + 3.0 * _print(list(value.values()))
    if isinstance(value, list | tuple):
        try:
            value = torch.from_numpy(np.asarray(value, dtype=np.float64))
        except (TypeError, ValueError, RuntimeError):  # of more than numbers of one shape
            return print_of(value[:_MOST])
    if isinstance(value, Tensor | np.ndarray):
        numbers = torch.as_tensor(value).detach().flatten()
        return print_of(numbers[:: max(1, numbers.numel() // _LARGEST)])
    return print_of(value)
