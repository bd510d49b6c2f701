"""The computation of a model's operations in a single process: functions, and arguments that stand for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias

from torch import Tensor

from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Network
from evener.tracer.ir import TorchModes
from evener.tracer.nested import map_values

Nest: TypeAlias = Any
"""Nested tuples, lists and dicts of values."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for the output of an operation."""

    operation: int


@dataclass(frozen=True, slots=True)
class At:
    """A placeholder for a module of the model, which differs on every rank."""

    path: str


@dataclass(frozen=True, slots=True)
class Item:
    """Takes one value out of the nest that an operation returns."""

    keys: tuple[Any, ...]

    def __call__(self, values: Nest) -> Any:
        """Return the value under the keys, one after another."""
        return reduce(getitem, self.keys, values)


@dataclass(frozen=True)
class Call:
    """The computation of an operation.

    Attributes:
        function: What to call with the arguments: a function, a module without weights, At a module of the model, or an
            Item. None if the operation says it all.
        args: Arguments with a Slot for every tensor; for an Item, one Slot for the whole nest.
        kwargs: Keyword arguments with a Slot for every tensor.
        modes: Modes that the model sets around it.
        is_random: Whether it draws random numbers.
        training: Modes that the model sets for a module and its submodules, in order; empty if these are the model's.
        line: File and line of the user's code; empty if the call is in a library.
        shapes: Shapes of the tensors that it returns, in order, if it draws random numbers.
    """

    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    modes: TorchModes | None = None
    is_random: bool = False
    training: tuple[bool, ...] = ()
    line: str = ""
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class OpGraph:
    """A model's operations for one shape of its inputs and one mode.

    Attributes:
        network: The operations, for the planner.
        calls: The computation of each operation.
        outputs: The model's outputs, with a Slot for every tensor.
        of_samples: Returns the graph for another number of samples.
        states: Values of buffers after the pass, by name; operations make new values.
        is_repeatable: Whether a second pass would start from the same state as the first one.
    """

    network: Network
    calls: tuple[Call, ...]
    outputs: Nest
    of_samples: Callable[[int], OpGraph]
    states: dict[str, Slot] = field(default_factory=dict)
    is_repeatable: bool = True


def filled(nest: Nest, tensors: Iterator[Tensor]) -> Nest:
    """Return a nest with a tensor for every Slot, in order."""
    return map_values(nest, lambda leaf: next(tensors) if isinstance(leaf, Slot) else leaf)
