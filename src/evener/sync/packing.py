"""Contributions and changes of the weights as they travel: plain, or with their parameters in fewer bytes.

What compressing loses of a contribution is not lost: it is added to the next one (error feedback), so that the sum of
what was sent follows the sum of what was meant to within one quantum. Towards the workers the same is reached without
a remainder: what is sent is the difference between the weights and what the worker has.

Parameters are compressed; statistics and counters travel as they are:

    | counters | float64 statistics | float32 statistics | code of float64 parameters | code of float32 parameters |
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.sync.agreement import Compression
from evener.sync.codes import CODES, Bytes, Code
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.layout import Floats, Layout

_ALIGNMENT = 4


class Packing:
    """The compressed image of a contribution, or of a change of the weights.

    Args:
        layout: of the states.
        compression: bf16 or int8.
        cores: that do it.
    """

    def __init__(self, layout: Layout, compression: Compression, cores: Cores) -> None:
        self._code: Code = CODES[compression]
        self._cores = cores
        plain = [s for s in layout.sections if s.kind != "parameter"]
        coded = [s for s in layout.sections if s.kind == "parameter" and s.size]
        sizes = [s.size * np.dtype(s.dtype).itemsize for s in plain] + [self._code.num_bytes(s.size) for s in coded]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._pieces = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._num_plain = len(plain)
        self.num_bytes = starts[-1]

    def pack(self, change: Flat, residual: Flat, image: Bytes) -> None:
        """Write `change` and what is owed from before into `image`; what cannot be expressed stays in `residual`."""
        self._copy_plain(change, image, is_writing=True)
        arrays = zip(change.parameters, residual.parameters, self._coded(image), strict=True)
        for values, owed, code in arrays:
            self._write_owing(values, owed, code)

    def unpack(self, image: Bytes, into: Flat) -> None:
        """Read a contribution."""
        self._copy_plain(into, image, is_writing=False)
        for values, code in zip(into.parameters, self._coded(image), strict=True):
            self._read(code, values)

    def pack_difference(self, weights: Flat, known: Flat, image: Bytes) -> None:
        """Write how to come from `known` to `weights`; `known` becomes what whoever reads it will have."""
        self._copy_plain(weights, image, is_writing=True)
        self._copy_plain(known, image, is_writing=False)
        arrays = zip(weights.parameters, known.parameters, self._coded(image), strict=True)
        for wanted, has, code in arrays:
            self._write_towards(wanted, has, code)

    def unpack_difference(self, image: Bytes, known: Flat) -> None:
        """Read a change of the weights into `known`."""
        self._copy_plain(known, image, is_writing=False)
        for values, code in zip(known.parameters, self._coded(image), strict=True):
            self._read_towards(code, values)

    def _coded(self, image: Bytes) -> list[Bytes]:
        return [image[piece] for piece in self._pieces[self._num_plain :]]

    def _copy_plain(self, flat: Flat, image: Bytes, is_writing: bool) -> None:
        sections = [s for s in flat.layout.sections if s.kind != "parameter"]
        for section, piece in zip(sections, self._pieces[: self._num_plain], strict=True):
            own = flat.memory[section.offset : section.offset + piece.stop - piece.start]
            np.copyto(image[piece], own) if is_writing else np.copyto(own, image[piece])

    def _write_owing(self, values: Floats, owed: Floats, code: Bytes) -> None:
        def block(thread: int, a: int, b: int) -> None:
            meant, meaning = self._scratch(thread, values[a:b])
            np.add(values[a:b], owed[a:b], out=meant)
            if self._code.write(meant, code, a, meaning):
                np.subtract(meant, meaning, out=owed[a:b])
            else:  # refused where it arrives; what was owed before still is
                np.subtract(meant, meaning, out=owed[a:b], where=np.isfinite(meaning))

        self._cores.each(0, values.size, values.itemsize, block)

    def _write_towards(self, wanted: Floats, has: Floats, code: Bytes) -> None:
        def block(thread: int, a: int, b: int) -> None:
            meant, meaning = self._scratch(thread, wanted[a:b])
            np.subtract(wanted[a:b], has[a:b], out=meant)
            self._code.write(meant, code, a, meaning)
            np.add(has[a:b], meaning, out=has[a:b])

        self._cores.each(0, wanted.size, wanted.itemsize, block)

    def _read(self, code: Bytes, out: Floats) -> None:
        def block(_: int, a: int, b: int) -> None:
            self._code.read(code, a, out[a:b])

        self._cores.each(0, out.size, out.itemsize, block)

    def _read_towards(self, code: Bytes, has: Floats) -> None:
        def block(thread: int, a: int, b: int) -> None:
            step, _ = self._scratch(thread, has[a:b])
            self._code.read(code, a, step)
            np.add(has[a:b], step, out=has[a:b])

        self._cores.each(0, has.size, has.itemsize, block)

    def _scratch(self, thread: int, like: Floats) -> tuple[Floats, Floats]:
        return self._cores.scratch(thread, 0, like), self._cores.scratch(thread, 1, like)


def packing_for(layout: Layout, compression: Compression, cores: Cores) -> Packing | None:
    """The packing, or None if states travel as they are."""
    return None if compression == "none" else Packing(layout, compression, cores)


def as_bytes(image: Any) -> NDArray[np.uint8]:
    """A buffer that arrived, as an array without a copy."""
    return np.frombuffer(image, np.uint8)
