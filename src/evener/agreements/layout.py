"""The layout of a model's state in memory, so that synchronization never loops over names.

A state is one block of bytes. The large sections are one flat array per dtype, with the parameters before the
statistics:

    | int64 counters | float64 parameters | float64 statistics | float32 parameters | float32 statistics |

The whole is one message for the wire, one buffer per dtype for arithmetic, and views by name for a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from evener.records.errors import InvalidValue, require
from evener.records.schema import Part, Whole

Kind = Literal["parameter", "statistic", "counter"]
DType = Literal["float32", "float64", "int64"]
Floats = NDArray[np.floating[Any]]

ArrayName = Annotated[str, Meta(min_length=1, max_length=1000)]
MAX_DIMENSIONS = 32
MAX_NUMBERS = 2**48
"""Limit of one array."""
SECTIONS: tuple[tuple[DType, Kind], ...] = (
    ("int64", "counter"),
    ("float64", "parameter"),
    ("float64", "statistic"),
    ("float32", "parameter"),
    ("float32", "statistic"),
)
"""Sections in the order of memory: the widest dtype first, so that all are aligned."""


class ArraySpec(Part, frozen=True, kw_only=True):
    """One named array of a model's state.

    Attributes:
        name: name of the array, unique in its layout.
        shape: shape of the array.
        dtype: float32, float64 or, of counters only, int64. Half precision is only for computing and for the wire.
        kind: a parameter is trained; a statistic (a running mean) is averaged; a counter's increments are summed.
    """

    name: ArrayName
    shape: Annotated[tuple[Whole, ...], Meta(max_length=MAX_DIMENSIONS)]
    dtype: DType
    kind: Kind

    def __post_init__(self) -> None:
        require(all(n >= 0 for n in self.shape), f"shape of {self.name}", self.shape, "sizes of zero or more")
        most = prod(max(1, n) for n in self.shape)
        require(most <= MAX_NUMBERS, f"shape of {self.name}", self.shape, f"of at most {MAX_NUMBERS} numbers")
        allowed = "float32 or float64, or int64 for a counter; store other trained arrays as float32"
        require((self.dtype == "int64") == (self.kind == "counter"), f"dtype of {self.name}", self.dtype, allowed)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class LayoutSection(Part, frozen=True, kw_only=True):
    """A flat array in memory: `size` elements of `dtype` from byte `offset` on."""

    dtype: DType
    kind: Kind
    offset: int
    size: int


class StateLayout(Part, frozen=True, kw_only=True, dict=True):
    """The arrays of a model's state; all nodes of a run have equal layouts."""

    entries: tuple[ArraySpec, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        require(len(set(names)) == len(names), "entries", sorted(names), "of unique names")
        require(any(e.kind == "parameter" for e in self.entries), "entries", names, "at least one parameter")

    @cached_property
    def sections(self) -> tuple[LayoutSection, ...]:
        """Flat arrays in order of memory, one for each of `SECTIONS`; some may be empty."""
        sections, offset = [], 0
        for dtype, kind in SECTIONS:
            size = sum(entry.size for entry in self._of(dtype, kind))
            sections.append(LayoutSection(dtype=dtype, kind=kind, offset=offset, size=size))
            offset += size * np.dtype(dtype).itemsize
        return tuple(sections)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a whole state."""
        last = self.sections[-1]
        return last.offset + last.size * np.dtype(last.dtype).itemsize

    @cached_property
    def float_offsets(self) -> tuple[int, ...]:
        """First byte of the float64 and of the float32 array, as far as they are not empty."""
        _, doubles, double_statistics, singles, single_statistics = self.sections
        pairs = ((doubles, double_statistics), (singles, single_statistics))
        return tuple(first.offset for first, second in pairs if first.size + second.size)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of every array, by its name."""
        offsets = {}
        for section in self.sections:
            offset = section.offset
            for entry in self._of(section.dtype, section.kind):
                offsets[entry.name] = offset
                offset += entry.size * np.dtype(entry.dtype).itemsize
        return offsets

    def _of(self, dtype: DType, kind: Kind) -> list[ArraySpec]:
        return [entry for entry in self.entries if (entry.dtype, entry.kind) == (dtype, kind)]


def layout_of(arrays: Mapping[str, NDArray[Any]], statistics: Collection[str] = ()) -> StateLayout:
    """Return the layout of named `arrays`: integers are counters, the arrays in `statistics` are statistics.

    Raises:
        InvalidValue: an array has a dtype that no layout holds.
    """
    return StateLayout(entries=tuple(_entry(name, array, name in statistics) for name, array in arrays.items()))


def _entry(name: str, array: NDArray[Any], is_statistic: bool) -> ArraySpec:
    dtype = known_dtype(name, array.dtype.name)
    kind: Kind = "counter" if dtype == "int64" else "statistic" if is_statistic else "parameter"
    return ArraySpec(name=name, shape=array.shape, dtype=dtype, kind=kind)


def known_dtype(name: str, dtype: str) -> DType:
    """Return the `dtype` of the array called `name`. Raises InvalidValue: no layout holds it."""
    for known, _ in SECTIONS:
        if known == dtype:
            return known
    raise InvalidValue(f"dtype of {name}", dtype, "float32, float64 or int64", "; store trained arrays as float32")


class Flat:
    """Memory with the layout `layout`.

    Attributes:
        layout: layout of the memory.
        memory: all of it, as bytes.
        floats: float64 and float32 arrays, parameters before statistics, without empty ones.
        parameters: first parts of these.
        statistics: second parts of these.
        counters: int64 array.
    """

    __slots__ = ("counters", "floats", "layout", "memory", "parameters", "statistics")

    def __init__(self, layout: StateLayout, memory: NDArray[np.uint8] | None = None) -> None:
        """Make views of `memory`, or of new memory filled with zeros.

        Raises:
            InvalidValue: `memory` has another size than the layout.
        """
        self.layout = layout
        self.memory = np.zeros(layout.num_bytes, np.uint8) if memory is None else memory
        require(self.memory.size == layout.num_bytes, "bytes of a state", self.memory.size, f"{layout.num_bytes}")
        counters, *rest = (self._section(section) for section in layout.sections)
        self.counters: NDArray[np.int64] = counters
        doubles, singles = layout.sections[1], layout.sections[3]
        wholes = (self._array(doubles, rest[0].size + rest[1].size), self._array(singles, rest[2].size + rest[3].size))
        self.floats: tuple[Floats, ...] = tuple(array for array in wholes if array.size)
        self.parameters: tuple[Floats, ...] = tuple(array for array in rest[0::2] if array.size)
        self.statistics: tuple[Floats, ...] = tuple(array for array in rest[1::2] if array.size)

    def _section(self, section: LayoutSection) -> NDArray[Any]:
        return self._array(section, section.size)

    def _array(self, section: LayoutSection, size: int) -> NDArray[Any]:
        dtype = np.dtype(section.dtype)
        return self.memory[section.offset : section.offset + size * dtype.itemsize].view(dtype)

    def views(self) -> dict[str, NDArray[Any]]:
        """Return the named arrays as views of this memory."""
        views = {}
        for entry in self.layout.entries:
            offset, dtype = self.layout.offsets[entry.name], np.dtype(entry.dtype)
            piece = self.memory[offset : offset + entry.size * dtype.itemsize]
            views[entry.name] = piece.view(dtype).reshape(entry.shape)
        return views

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the named `arrays` into this memory; every name of the layout is needed."""
        for name, view in self.views().items():
            np.copyto(view, arrays[name])

    def copy_from(self, other: Flat) -> None:
        """Copy all of `other`, which has the same layout."""
        np.copyto(self.memory, other.memory)

    def copy(self) -> Flat:
        """Return a copy in memory of its own."""
        return Flat(self.layout, self.memory.copy())


def flat_of(layout: StateLayout, arrays: Mapping[str, NDArray[Any]]) -> Flat:
    """Return a state that holds a copy of the named `arrays`."""
    flat = Flat(layout)
    flat.fill(arrays)
    return flat
