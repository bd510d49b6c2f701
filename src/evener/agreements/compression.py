"""Compression of contributions and changes of the weights: bf16, 8-bit integers, or the largest numbers only.

Numbers that cannot be encoded (NaN, infinity, numbers beyond the range) are sent as NaN or infinity, which the server
refuses. Decoding is exact, with the same bits on every machine: the scales have 16 significant bits, so that scale
times code needs no rounding, and decoded numbers are encoded to the same bytes again.

The error of compressing a contribution is added to the next one (error feedback): with bf16 and int8, the sum of the
sent contributions follows the exact sum to within one quantum. With `top-k` the error decays: after local steps most of
it is found again by the next ones, and would count twice; of gradients it would come too late and too large. Towards
the workers no error is kept, since the server sends the difference between the weights and the worker's copy; with
`top-k` it sends merged contributions, see `weights`.

Parameters are compressed; statistics and counters are sent as they are:

    | counters | float64 statistics | float32 statistics | code of float64 parameters | code of float32 parameters |
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evener.agreements.layout import Flat, Floats, StateLayout
from evener.agreements.settings import Compression
from evener.agreements.threads import ThreadPool

Bytes = NDArray[np.uint8]

ROW = 256
"""Numbers that share a scale."""
CHUNK, _KEPT = 4096, 64
"""Numbers of a chunk, and how many of them are sent."""

_MAX_CODE = 127
_MIN_SCALE = float(np.finfo(np.float32).tiny)
_BF16_LIMIT = float(np.array([0x7F7F8000], np.uint32).view(np.float32)[0])
"""Smallest number that bf16 rounds to infinity."""


class Codec(Protocol):
    """Encodes many numbers, a block at a time, at offsets that are multiples of `ROW` and `CHUNK`."""

    @property
    def feedback(self) -> float:
        """Return the fraction of the error of a contribution that is added to the next one."""
        ...

    def num_bytes(self, total: int) -> int:
        """Return the bytes of the image of `total` numbers."""
        ...

    def write(self, numbers: Floats, image: Bytes, a: int, meaning: Floats) -> bool:
        """Encode `numbers` as those from `a` on.

        Args:
            numbers: numbers to encode; they are not changed.
            image: image of all numbers, with `num_bytes` bytes.
            a: index of the first of `numbers`.
            meaning: set to the decoded numbers.

        Returns:
            Whether all of them could be encoded.
        """
        ...

    def read(self, image: Bytes, a: int, out: Floats) -> None:
        """Decode the numbers from `a` on into `out`."""
        ...


class Bf16:
    """The upper half of a float32, rounded to nearest, ties to even."""

    feedback = 1.0

    def num_bytes(self, total: int) -> int:
        """Return two bytes per number."""
        return 2 * total

    def write(self, numbers: Floats, image: Bytes, a: int, meaning: Floats) -> bool:
        """See `Codec`."""
        is_fine = bool(np.maximum.reduce(numbers) < _BF16_LIMIT and np.minimum.reduce(numbers) > -_BF16_LIMIT)
        singles = numbers if numbers.dtype == np.float32 else numbers.astype(np.float32)
        rounded = meaning if meaning.dtype == np.float32 else np.empty_like(singles)
        bits, out = singles.view(np.uint32), rounded.view(np.uint32)
        np.right_shift(bits, 16, out=out)
        np.bitwise_and(out, 1, out=out)
        np.add(out, bits, out=out)
        np.add(out, 0x7FFF, out=out)
        np.bitwise_and(out, 0xFFFF0000, out=out)
        if not is_fine:  # the carry may have changed a NaN into a number
            out[np.isnan(singles)] = 0x7FC00000
        np.right_shift(out, 16, out=self._codes(image, a, len(out)), casting="unsafe")
        if rounded is not meaning:
            np.copyto(meaning, rounded)
        return is_fine

    def read(self, image: Bytes, a: int, out: Floats) -> None:
        """See `Codec`."""
        singles = out if out.dtype == np.float32 else np.empty(len(out), np.float32)
        bits = singles.view(np.uint32)
        np.copyto(bits, self._codes(image, a, len(out)))
        np.left_shift(bits, 16, out=bits)
        if singles is not out:
            np.copyto(out, singles)

    def _codes(self, image: Bytes, a: int, count: int) -> NDArray[np.uint16]:
        return image[2 * a : 2 * (a + count)].view(np.uint16)


class Int8:
    """Integers from -127 to 127 times a scale: | float32 scale of every row | int8 code of every number |."""

    feedback = 1.0

    def num_bytes(self, total: int) -> int:
        """Return one byte per number, and four per row."""
        return 4 * -(-total // ROW) + total

    def write(self, numbers: Floats, image: Bytes, a: int, meaning: Floats) -> bool:
        """See `Codec`."""
        is_fine = True
        for rows, scales, codes, out in self._tables(numbers, image, a, meaning):
            np.absolute(rows, out=out)
            _scales(np.maximum.reduce(out, axis=1), out=scales)
            np.multiply(rows, _inverse(scales)[:, None], out=out)
            np.rint(out, out=out)
            np.copyto(codes, out, casting="unsafe")
            np.multiply(out, scales[:, None], out=out)
            is_fine &= bool(np.isfinite(scales).all())
        return is_fine

    def read(self, image: Bytes, a: int, out: Floats) -> None:
        """See `Codec`."""
        for _, scales, codes, rows in self._tables(out, image, a, out):
            np.copyto(rows, codes)
            np.multiply(rows, scales[:, None], out=rows)

    def _tables(self, numbers: Floats, image: Bytes, a: int, meaning: Floats) -> list[tuple[Any, ...]]:
        """Return the whole rows as a table, then the rest as one shorter row: numbers, scales, codes, meaning."""
        num_rows, whole = -(-len(image) // (ROW + 4)), len(numbers) // ROW * ROW
        scales = image[: 4 * num_rows].view(np.float32)[a // ROW :]
        codes = image[4 * num_rows :].view(np.int8)[a : a + len(numbers)]
        cuts = ((0, whole, ROW), (whole, len(numbers), len(numbers) - whole))
        return [
            (
                numbers[i:j].reshape(-1, width),
                scales[i // ROW : -(-j // ROW)],
                codes[i:j].reshape(-1, width),
                meaning[i:j].reshape(-1, width),
            )
            for i, j, width in cuts
            if j > i
        ]


class TopK:
    """The 64 numbers of every 4096 that are farthest from zero: a sign and one of two magnitudes each; zeros otherwise.

    After Sarfi et al., 2025 (SparseLoCo). The magnitudes are the means of those below and above the mean of all 64;
    if fewer than 64 differ from zero, the mean of these, and zero. If a number is not finite, at least one of the two
    is not, and no number of the chunk counts as sent.

        | two bf16 magnitudes of every chunk | 12-bit positions of its numbers | their signs and choices, 2 bits each |
    """

    feedback = 0.8  # at 0.95, as published, changes in which all numbers move alike come several times too large
    _LEVELS, _POSITIONS, _CODES = 4, _KEPT * 12 // 8, _KEPT * 2 // 8
    """Bytes of a chunk."""

    def num_bytes(self, total: int) -> int:
        """Return 116 bytes per chunk of up to 4096 numbers."""
        return -(-total // CHUNK) * (self._LEVELS + self._POSITIONS + self._CODES)

    def write(self, numbers: Floats, image: Bytes, a: int, meaning: Floats) -> bool:
        """See `Codec`."""
        whole = len(numbers) // CHUNK * CHUNK
        meaning.fill(0)
        is_fine = True
        if whole:
            is_fine = self._write(numbers[:whole].reshape(-1, CHUNK), image, a, meaning[:whole].reshape(-1, CHUNK))
        if whole < len(numbers):
            rest, meant = np.zeros((2, 1, CHUNK), numbers.dtype)
            rest[0, : len(numbers) - whole] = numbers[whole:]
            is_fine &= self._write(rest, image, a + whole, meant)
            meaning[whole:] = meant[0, : len(numbers) - whole]
        return is_fine

    def read(self, image: Bytes, a: int, out: Floats) -> None:
        """See `Codec`."""
        whole = len(out) // CHUNK * CHUNK
        out.fill(0)
        if whole:
            self._read(image, a, out[:whole].reshape(-1, CHUNK))
        if whole < len(out):
            rest = np.zeros((1, CHUNK), out.dtype)
            self._read(image, a + whole, rest)
            out[whole:] = rest[0, : len(out) - whole]

    def _write(self, chunks: Floats, image: Bytes, a: int, meaning: Floats) -> bool:
        """Encode whole chunks; set what was kept of them in `meaning`, which is zero."""
        levels, packed, codes = self._tables(image, a, len(chunks))
        sizes = np.absolute(chunks)
        positions = np.argpartition(sizes, CHUNK - _KEPT, axis=1)[:, CHUNK - _KEPT :]
        positions.sort(axis=1)
        kept, sizes = (np.take_along_axis(table, positions, 1) for table in (chunks, sizes))
        is_large = sizes > np.where(sizes.min(1) == 0, 0, sizes.mean(1))[:, None]
        num_large = is_large.sum(1)
        large = np.where(is_large, sizes, 0).sum(1) / np.maximum(num_large, 1)
        small = np.where(is_large, 0, sizes).sum(1) / np.maximum(_KEPT - num_large, 1)
        rounded = np.empty((len(chunks), 2), np.float32)
        is_fine = Bf16().write(np.stack((small, large), 1).ravel(), levels, 0, rounded.ravel())
        is_negative = kept < 0
        values = np.where(is_large, rounded[:, 1:], rounded[:, :1])
        np.put_along_axis(meaning, positions, np.where(is_negative, -values, values).astype(meaning.dtype), 1)
        meaning[~np.isfinite(rounded).all(1)] = np.nan
        even, odd = positions[:, ::2], positions[:, 1::2]
        packed[:, 0::3], packed[:, 1::3], packed[:, 2::3] = even & 0xFF, even >> 8 | (odd & 0xF) << 4, odd >> 4
        bits = is_negative | is_large.astype(np.uint8) << 1
        np.bitwise_or.reduce(bits.reshape(len(bits), -1, 4) << np.arange(0, 8, 2, dtype=np.uint8), axis=2, out=codes)
        return is_fine

    def _read(self, image: Bytes, a: int, chunks: Floats) -> None:
        """Decode whole chunks into `chunks`, which are zero."""
        levels, packed, codes = self._tables(image, a, len(chunks))
        magnitudes = np.empty((len(chunks), 2), np.float32)
        Bf16().read(levels, 0, magnitudes.ravel())
        first, second, third = (packed[:, i::3].astype(np.intp) for i in range(3))
        positions = np.stack((first | (second & 0xF) << 8, second >> 4 | third << 4), 2).reshape(len(chunks), _KEPT)
        bits = (codes[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(chunks), _KEPT)
        values = np.take_along_axis(magnitudes, (bits >> 1).astype(np.intp), 1)
        np.put_along_axis(chunks, positions, np.where(bits & 1, -values, values).astype(chunks.dtype), 1)

    def _tables(self, image: Bytes, a: int, count: int) -> tuple[Bytes, Bytes, Bytes]:
        """Return bytes of `count` chunks from number `a` on: of magnitudes in a row, of positions, of codes."""
        num_chunks = len(image) // (self._LEVELS + self._POSITIONS + self._CODES)
        tables, start = [], 0
        for width in (self._LEVELS, self._POSITIONS, self._CODES):
            table = image[start : start + num_chunks * width].reshape(num_chunks, width)
            tables.append(table[a // CHUNK : a // CHUNK + count])
            start += num_chunks * width
        levels, packed, codes = tables
        return levels.reshape(-1), packed, codes


CODECS: dict[Compression, Codec] = {"bf16": Bf16(), "int8": Int8(), "top-k": TopK()}


def _scales(largest: Floats, out: NDArray[np.float32]) -> None:
    """Return the smallest scales of 16 significant bits with codes up to 127; 0 if all numbers are too small.

    A scale is NaN if a number is not finite, or would not be after decoding.
    """
    np.divide(largest, _MAX_CODE, out=out, casting="same_kind")
    is_nothing, is_bad = out < _MIN_SCALE, ~np.isfinite(out)
    bits = out.view(np.uint32)
    np.add(bits, 0xFF, out=bits)
    np.bitwise_and(bits, 0xFFFFFF00, out=bits)
    out[is_nothing] = 0
    out[is_bad | ~np.isfinite(_MAX_CODE * out)] = np.nan


def _inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1 / scale; 0 for scales of 0 or NaN."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)


_ALIGNMENT = 4


class Compressor:
    """Encodes contributions, or changes of the weights.

    Args:
        layout: layout of the states.
        compression: any but `none`.
        cores: threads that compute.
    """

    def __init__(self, layout: StateLayout, compression: Compression, cores: ThreadPool) -> None:
        self._code: Codec = CODECS[compression]
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
        """Encode `change` plus `residual`, or a fraction of it, into `image`; the error becomes the new `residual`."""
        self._copy_plain(change, image, is_writing=True)
        arrays = zip(change.parameters, residual.parameters, self._coded(image), strict=True)
        for values, owed, code in arrays:
            self._write_residual(values, owed, code)

    def pack_once(self, change: Flat, image: Bytes) -> None:
        """Encode `change` into `image`, and forget the error."""
        self._copy_plain(change, image, is_writing=True)
        for values, code in zip(change.parameters, self._coded(image), strict=True):
            self._write(values, code)

    def unpack(self, image: Bytes, into: Flat) -> None:
        """Decode a contribution."""
        self._copy_plain(into, image, is_writing=False)
        for values, code in zip(into.parameters, self._coded(image), strict=True):
            self._read(code, values)

    def pack_difference(self, weights: Flat, known: Flat, image: Bytes) -> None:
        """Encode the difference from `known` to `weights`; `known` becomes the state that a reader will have."""
        self._copy_plain(weights, image, is_writing=True)
        self._copy_plain(known, image, is_writing=False)
        arrays = zip(weights.parameters, known.parameters, self._coded(image), strict=True)
        for wanted, has, code in arrays:
            self._write_towards(wanted, has, code)

    def unpack_difference(self, image: Bytes, known: Flat) -> None:
        """Add a decoded change of the weights to `known`."""
        self._copy_plain(known, image, is_writing=False)
        for values, code in zip(known.parameters, self._coded(image), strict=True):
            self._read_towards(code, values)

    def _coded(self, image: Bytes) -> list[Bytes]:
        return [image[piece] for piece in self._pieces[self._num_plain :]]

    def _copy_plain(self, flat: Flat, image: Bytes, is_writing: bool) -> None:
        sections = [s for s in flat.layout.sections if s.kind != "parameter"]
        for section, piece in zip(sections, self._pieces[: self._num_plain], strict=True):
            section_bytes = flat.memory[section.offset : section.offset + piece.stop - piece.start]
            np.copyto(image[piece], section_bytes) if is_writing else np.copyto(section_bytes, image[piece])

    def _write_residual(self, values: Floats, owed: Floats, code: Bytes) -> None:
        def block(thread: int, a: int, b: int) -> None:
            meant, meaning = self._scratch(thread, values[a:b])
            np.multiply(owed[a:b], self._code.feedback, out=meant)
            np.add(values[a:b], meant, out=meant)
            if self._code.write(meant, code, a, meaning):
                np.subtract(meant, meaning, out=owed[a:b])
            else:  # the server refuses it; the earlier residual stays
                np.subtract(meant, meaning, out=owed[a:b], where=np.isfinite(meaning))

        self._cores.each(0, values.size, values.itemsize, block)

    def _write(self, values: Floats, code: Bytes) -> None:
        def block(thread: int, a: int, b: int) -> None:
            _, meaning = self._scratch(thread, values[a:b])
            self._code.write(values[a:b], code, a, meaning)

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


def compressor_for(layout: StateLayout, compression: Compression, cores: ThreadPool) -> Compressor | None:
    """Return the compressor, or None if states are sent as they are."""
    return None if compression == "none" else Compressor(layout, compression, cores)


def as_bytes(image: Any) -> NDArray[np.uint8]:
    """Return a received buffer as an array, without a copy."""
    return np.frombuffer(image, np.uint8)
