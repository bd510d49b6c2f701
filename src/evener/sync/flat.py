"""A model's state, or a change of it, in one piece of memory, seen as few long arrays or as many named ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.errors import require
from evener.sync.layout import Floats, Layout, Section


class Flat:
    """Memory that is laid out as `layout` says.

    Attributes:
        layout: of the memory.
        memory: all of it, as bytes.
        floats: the float64 and the float32 array, parameters before statistics; empty ones are left out.
        parameters: the first parts of these.
        statistics: the rest of these.
        counters: whole numbers.
    """

    __slots__ = ("counters", "floats", "layout", "memory", "parameters", "statistics")

    def __init__(self, layout: Layout, memory: NDArray[np.uint8] | None = None) -> None:
        """Views of `memory`, or of new memory filled with zeros.

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

    def _section(self, section: Section) -> NDArray[Any]:
        return self._array(section, section.size)

    def _array(self, section: Section, size: int) -> NDArray[Any]:
        dtype = np.dtype(section.dtype)
        return self.memory[section.offset : section.offset + size * dtype.itemsize].view(dtype)

    def views(self) -> dict[str, NDArray[Any]]:
        """The named arrays; what is written into them is written into this memory."""
        found = {}
        for entry in self.layout.entries:
            offset, dtype = self.layout.offsets[entry.name], np.dtype(entry.dtype)
            piece = self.memory[offset : offset + entry.size * dtype.itemsize]
            found[entry.name] = piece.view(dtype).reshape(entry.shape)
        return found

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the named `arrays` in; every name of the layout is needed."""
        for name, view in self.views().items():
            np.copyto(view, arrays[name])

    def copy_from(self, other: Flat) -> None:
        """Take over all of `other`, of the same layout."""
        np.copyto(self.memory, other.memory)

    def copy(self) -> Flat:
        """The same in memory of its own."""
        return Flat(self.layout, self.memory.copy())


def flat_of(layout: Layout, arrays: Mapping[str, NDArray[Any]]) -> Flat:
    """A state that holds a copy of the named `arrays`."""
    flat = Flat(layout)
    flat.fill(arrays)
    return flat
