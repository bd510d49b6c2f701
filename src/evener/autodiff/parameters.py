"""Parameters, and their flat buffers: one contiguous array is sent, saved or stepped.

    arena = ParameterArena(model.named_parameters())
    arena.values       [P]  all parameters, concatenated; each parameter's tensor is a view
    arena.gradients    [P]  what backward has added up, zero where nothing was
    arena.entries           name, shape and position of each

An optimizer creates the arena, or uses the existing one. Backward writes into it directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from evener.autodiff.backends.interface import Array, Backend
from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.graph import Leaf, clock
from evener.autodiff.tensors.tensor import Tensor


class Parameter(Tensor):
    """A tensor that a module registers under the name that it is assigned to, and that an optimiser changes."""

    __slots__ = ("_home",)

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        backend, array = data._lease.backend, data._usable()
        if data._lease is not backend.permanent:
            array = backend.copy(array, backend.empty(tuple(array.shape), array.dtype))
        super().__init__(array, backend.permanent)
        self._home: Home | None = None
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Make it collect its gradient, or stop doing so (for a frozen layer)."""
        super().requires_grad_(requires_grad)
        if requires_grad and self._home is not None:
            self._edge = self._home.leaf
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return Parameter(super().__deepcopy__(memo).detach(), self.requires_grad)


class Entry(NamedTuple):
    """The position of a parameter in the flat buffers.

    Attributes:
        name: name in the model; its number if the parameters have no names.
        shape: of the parameter.
        offset: of its first element.
        size: number of its elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Home(NamedTuple):
    """The arena of a parameter, its position there, and its gradient's leaf in the arena."""

    arena: ParameterArena
    entry: Entry
    leaf: Leaf


class ParameterArena:
    """Moves parameters into one flat buffer, and their gradients into another of the same order.

    Args:
        parameters: of one element type and back end, with their names (`model.named_parameters()`) or without.

    Attributes:
        entries: name, shape and place of each parameter, in the order given, without gaps.
        values: all values; code that writes into it must call `changed()`, or use `load`.

    Raises:
        InvalidOperation: there are none, they differ in type or back end, or one lies in another arena.
    """

    def __init__(self, parameters: Iterable[Parameter] | Iterable[tuple[str, Parameter]]) -> None:
        named = _named(parameters)
        self.backend = _common_backend(named)
        self.entries = _entries(named)
        kind = named[0][1]._array.dtype
        self.values, self._gradients = self._flat(kind), self._flat(kind)
        places = zip(self.entries, self.parts(self.values), self.parts(self._gradients), strict=True)
        self._leaves = [self._move_in(parameter, *place) for (_, parameter), place in zip(named, places, strict=True)]

    @property
    def size(self) -> int:
        """The number of elements of all parameters."""
        return len(self.values)

    @property
    def gradients(self) -> Array:
        """All gradients, zero where backward has added none since `zero_grad`."""
        for leaf in self._leaves:
            if leaf.gradient is None:
                self.backend.fill(leaf.room, 0)
        return self._gradients

    def load(self, values: Any) -> None:
        """Load all values from an array [P], for instance from a server."""
        self._write(self.values, values)
        self.changed()

    def load_gradients(self, gradients: Any) -> None:
        """Load all gradients from an array [P], for instance an average over workers, for the next step."""
        self._write(self._gradients, gradients)
        for leaf in self._leaves:
            leaf.gradient = leaf.room

    def changed(self) -> None:
        """Record a change of values, after which earlier graphs cannot be walked."""
        now = next(clock)
        for leaf in self._leaves:
            leaf.changed_at = now

    def zero_grad(self) -> None:
        """Reset all gradients."""
        for leaf in self._leaves:
            leaf.gradient = None

    def zeros(self) -> Array:
        """Return a new flat buffer [P] in the order of the parameters, for an optimizer's state."""
        return self.backend.fill(self._flat(self.values.dtype), 0)

    def parts(self, flat: Array) -> list[Array]:
        """Return views of each parameter's part of a flat buffer, in its shape."""
        be = self.backend
        return [be.reshape(flat[e.offset : e.offset + e.size], e.shape) for e in self.entries]

    def _flat(self, dtype: Any) -> Array:
        return self.backend.empty((sum(entry.size for entry in self.entries),), dtype)

    def _move_in(self, parameter: Parameter, entry: Entry, values: Array, gradients: Array) -> Leaf:
        leaf = Leaf(entry.shape, parameter._lease, gradients)
        parameter._array = self.backend.copy(parameter._array, values)
        if parameter.grad is not None:
            leaf.receive(parameter.grad._array)
        parameter._home = Home(self, entry, leaf)
        parameter._edge = leaf if parameter.requires_grad else None
        return leaf

    def _write(self, flat: Array, source: Any) -> None:
        array = source if type(source) is type(flat) else self.backend.from_numpy(np.asarray(source))
        expected, got = tuple(flat.shape), tuple(array.shape)
        require(expected == got, "the parameters take a flat array of shape {}, got {}", expected, got)
        self.backend.copy(array, flat)


def arena_of(parameters: Sequence[Parameter]) -> ParameterArena:
    """Return the arena of all `parameters`; a new one if they have none.

    Raises:
        InvalidOperation: they lie in different arenas, or only some in one.
    """
    homes = {None if p._home is None else p._home.arena for p in parameters}
    if homes == {None}:
        return ParameterArena(parameters)
    arena = homes.pop()
    if homes or arena is None:
        raise InvalidOperation("the parameters lie in different arenas: gather those of the whole model at once")
    return arena


def _named(parameters: Iterable[Parameter] | Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """Return names and parameters, each parameter once."""
    by_id: dict[int, tuple[str, Parameter]] = {}
    for number, item in enumerate(parameters):
        name, parameter = item if isinstance(item, tuple) else (str(number), item)
        require(isinstance(parameter, Parameter), "an arena holds nn.Parameter, got {}", type(parameter).__name__)
        require(parameter._home is None, "parameter {} lies in another arena already", name)
        by_id.setdefault(id(parameter), (name, parameter))
    require(bool(by_id), "an arena needs at least one parameter")
    return list(by_id.values())


def _common_backend(named: list[tuple[str, Parameter]]) -> Backend:
    first = named[0][1]
    for name, parameter in named:
        same = parameter.dtype == first.dtype and parameter._lease is first._lease
        require(same, "parameters of an arena have one type and back end; {} differs from {}", name, named[0][0])
    return first._lease.backend


def _entries(named: list[tuple[str, Parameter]]) -> tuple[Entry, ...]:
    entries, offset = [], 0
    for name, parameter in named:
        entries.append(Entry(name, parameter.shape, offset, prod(parameter.shape)))
        offset += entries[-1].size
    return tuple(entries)
