"""What computes the operations of a model in one process: functions, and arguments that stand for tensors."""

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
"""Values in tuples, lists and dicts."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the output of an operation."""

    operation: int


@dataclass(frozen=True, slots=True)
class At:
    """Stands for a module of the model, which on every rank is another one."""

    path: str


@dataclass(frozen=True, slots=True)
class Item:
    """Takes one value out of the nest that an operation returns."""

    keys: tuple[Any, ...]

    def __call__(self, values: Nest) -> Any:
        """What lies under the keys, one after another."""
        return reduce(getitem, self.keys, values)


@dataclass(frozen=True)
class Call:
    """What computes an operation.

    Attributes:
        function: to be called with the arguments: a function, a module without weights, At a module of the model, an
            Item; None where the operation says it all.
        args: with a Slot for every tensor; for an Item one for the whole nest.
        kwargs: likewise.
        modes: that the model sets around it.
        is_random: whether it draws random numbers.
        training: modes that the model sets for a module and those inside, in order; empty if they are the model's own.
        line: file and line of the user's code that it comes from; empty if that is a library's.
        shapes: of the tensors that it returns, in order, if it draws random numbers.
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
        network: for the planner.
        calls: one an operation.
        outputs: what the model returns, with a Slot for every tensor.
        of_samples: the same for another number of samples.
        states: by name, what buffers that the pass changes hold afterwards; operations make new values.
        is_repeatable: whether a second pass would begin with what the first one did.
    """

    network: Network
    calls: tuple[Call, ...]
    outputs: Nest
    of_samples: Callable[[int], OpGraph]
    states: dict[str, Slot] = field(default_factory=dict)
    is_repeatable: bool = True


def filled(nest: Nest, tensors: Iterator[Tensor]) -> Nest:
    """A nest with a tensor for every Slot, in order."""
    return map_values(nest, lambda leaf: next(tensors) if isinstance(leaf, Slot) else leaf)
