"""The default back end: NumPy on one core or more, writing results into memory of the caller's arena."""

# ruff: noqa: D102  the interface documents each primitive

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from evener.autodiff.backends.interface import Array, Backend, Shape, binary, broadcast_shape, names_once, unary
from evener.autodiff.backends.numpy_images import NumpyImages

ALIGNMENT = 64
"""Bytes of a cache line, and of an AVX-512 register."""

_ERFC = {
    8: (
        -0.6717940840566923, 0.6726432239776567, 0.04734330684190443, -0.0468956102311753, -0.009872689366389959,
        0.008824938557060623, 0.001758933557799016, -0.002345812500482853, -0.00014624686337800336,
        0.000673678795580235, -9.37350311709817e-05, -0.0001743029472030762, 7.14010141275703e-05,
        3.17451797494374e-05, -3.0187884551394243e-05, 1.3772664134464417e-07, 8.562623420121286e-06,
        -2.947986876998259e-06, -1.27231190486887e-06, 1.2500276612569754e-06, -1.6849800720653297e-07,
        -2.495832761719667e-07, 1.5334345920908177e-07, 1.4448658046252676e-09, -3.9171820510271855e-08,
        1.1172352263623759e-08, 4.06088214696972e-09, -1.8902306008944537e-09,
    ),
    4: (
        -0.6717940916807759, 0.672643154774543, 0.047343887612987114, -0.04689364055996262, -0.009880019324020219,
        0.008808825369385993, 0.0017940662497394012, -0.002288765238593006, -0.00022791096599906392,
        0.0005737663720050471, 8.000738161697865e-06, -8.728381021688478e-05,
    ),
}  # fmt: skip
"""By item size, P with erfc(z) = t exp(P(2t - 1) - z^2), t = 2 / (2 + z), z >= 0: the interpolation at 60 Chebyshev
nodes, computed with 60 digits and cut where the type's precision ends (relative error 1e-14 and 1e-8)."""


_BITS = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_INT64 = np.dtype(np.int64)


class NumpyBackend(NumpyImages):
    """Arrays are `numpy.ndarray`; NumPy's own rules (`numpy.errstate`) say what overflow and division by zero do."""

    name = "numpy"
    block = 32768
    failures = (ValueError, IndexError, TypeError)
    comparisons = {
        "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    }  # fmt: skip

    # Memory.

    def empty(self, shape: Shape, dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def allocate(self, num_bytes: int) -> Array:
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + num_bytes]

    def carve(self, buffer: Array, offset: int, shape: Shape, dtype: Any) -> Array:
        return np.ndarray(shape, dtype, buffer.data, offset)

    def native(self, dtype: np.dtype[Any]) -> Any:
        return dtype

    def numpy_type(self, dtype: Any) -> np.dtype[Any]:
        return dtype  # type: ignore[no-any-return]

    def from_numpy(self, array: Array) -> Array:
        return array

    def to_numpy(self, array: Array) -> Array:
        return array

    def copy(self, source: Array, out: Array) -> Array:
        np.copyto(out, source, casting="unsafe")
        return out

    def fill(self, out: Array, value: float) -> Array:
        out.fill(value)
        return out

    # Elementwise.

    add, subtract, multiply, divide = binary(np.add), binary(np.subtract), binary(np.multiply), binary(np.divide)
    power, maximum = binary(np.power), binary(np.maximum)
    negative, absolute, sign = unary(np.negative), unary(np.absolute), unary(np.sign)
    exp, log, sqrt, tanh = unary(np.exp), unary(np.log), unary(np.sqrt), unary(np.tanh)

    def sigmoid(self, a: Array, out: Array | None = None) -> Array:
        y = self.new(a.shape, a.dtype) if out is None else out
        below = np.minimum(a, 0, out=self.new(a.shape, a.dtype))  # exp(min(a, 0)) / (1 + exp(-|a|)) never overflows
        np.exp(below, below)
        np.negative(np.absolute(a, y), y)
        np.add(np.exp(y, y), 1, y)
        return np.divide(below, y, y)

    def normal_cdf(self, a: Array, out: Array | None = None) -> Array:
        y, z, t, u = (self.new(a.shape, a.dtype) for _ in range(4))
        np.multiply(np.absolute(a, z), 0.5**0.5, z)
        np.divide(2, np.add(z, 2, t), t)
        np.subtract(np.multiply(t, 2, u), 1, u)
        first, *others = reversed(_ERFC[a.itemsize])
        y.fill(first)
        for coefficient in others:
            np.add(np.multiply(y, u, y), coefficient, y)
        np.exp(np.subtract(y, np.multiply(z, z, z), y), y)
        np.multiply(np.multiply(y, t, y), 0.5, y)  # below zero; above it is one less this
        np.copysign(y, a, t)
        np.subtract(np.greater(a, 0, u), t, y if out is None else out)
        return np.absolute(y if out is None else out, y if out is None else out)

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        shape = broadcast_shape(broadcast_shape(a.shape, b.shape), condition.shape)
        out = self.copy(b, self.new(shape, a.dtype))
        np.copyto(out, a, where=condition)
        return out

    def keep(self, a: Array, condition: Array, out: Array | None = None) -> Array:
        out, bits = self.new(a.shape, a.dtype) if out is None else out, _BITS[a.itemsize]
        mask = self.copy(condition, self.new(condition.shape, bits))
        np.multiply(a.view(bits), mask, out.view(bits))  # of the bits, so that infinity times 0 is 0
        return out

    # Reductions.

    def sum(self, a: Array, axes: Shape, keepdims: bool, out: Array | None = None) -> Array:
        out = self._reduced(a, axes, keepdims) if out is None else out
        return np.add.reduce(a, axes, out=out, keepdims=keepdims)

    def max(self, a: Array, axes: Shape, keepdims: bool) -> Array:
        return np.maximum.reduce(a, axes, out=self._reduced(a, axes, keepdims), keepdims=keepdims)

    def argmax(self, a: Array, axis: int, keepdims: bool) -> Array:
        out = self._reduced(a, (axis,), keepdims, _INT64)
        return np.argmax(a, axis, out, keepdims=keepdims)

    def _reduced(self, a: Array, axes: Shape, keepdims: bool, dtype: Any = None) -> Array:
        return self.new(_reduced_shape(a.shape, axes, keepdims), dtype or a.dtype)

    # Shapes.

    def reshape(self, a: Array, shape: Shape) -> Array:
        return self._contiguous(a).reshape(shape)

    def transpose(self, a: Array, axes: Shape) -> Array:
        return a.transpose(axes)

    def broadcast(self, a: Array, shape: Shape) -> Array:
        return np.broadcast_to(a, shape)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        shape = list(arrays[0].shape)
        shape[axis] = sum(a.shape[axis] for a in arrays)
        return np.concatenate(arrays, axis, out=self.new(tuple(shape), arrays[0].dtype))

    def take(self, a: Array, index: Any) -> Array:
        return np.asarray(a[index])  # integers alone would give a number instead of an array

    def put_add(self, shape: Shape, index: Any, values: Array, out: Array | None = None) -> Array:
        out = self.zeros(shape, values.dtype) if out is None else self.fill(out, 0)
        if names_once(index):
            out[index] = values
        else:
            np.add.at(out, index, values)
        return out

    def take_along(self, a: Array, index: Array, axis: int) -> Array:
        return np.take_along_axis(a, index, axis)

    def put_along(self, shape: Shape, index: Array, values: Array, axis: int) -> Array:
        grid = list(np.ogrid[tuple(slice(size) for size in index.shape)])
        grid[axis] = index
        return self.put_add(shape, tuple(grid), values)

    def take_rows(self, table: Array, index: Array) -> Array:
        self._check_index(index, len(table))
        return np.take(table, index, 0, self.new(index.shape + table.shape[1:], table.dtype), "clip")

    def pick(self, a: Array, index: Array) -> Array:
        self._check_index(index, a.shape[1])
        return np.take(self._contiguous(a), self._places(a.shape, index), None, self.new(index.shape, a.dtype), "clip")

    def unpick(self, shape: Shape, index: Array, values: Array) -> Array:
        out = self.zeros(shape, values.dtype)
        np.put(out, self._places(shape, index), values, "clip")
        return out

    def _places(self, shape: Shape, index: Array) -> Array:
        """Return the positions of [n, index[n]] in a flat array."""
        return np.add(_row_starts(*shape), index, self.new(index.shape, _INT64))

    def _check_index(self, index: Array, size: int) -> None:
        """Raise IndexError for negative or too large indices, which NumPy would wrap or clip."""
        unsigned = index.view(_UNSIGNED[index.itemsize])  # where negative ones are huge
        if index.size and np.maximum.reduce(unsigned, None) >= size:
            raise IndexError(f"an index is outside 0..{size - 1}")

    # Products, convolution and pooling.

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        if out is None:
            batch = () if a.ndim == b.ndim == 2 else broadcast_shape(a.shape[:-2], b.shape[:-2])
            out = self.new((*batch, a.shape[-2], b.shape[-1]), a.dtype)
        return np.matmul(a, b, out)

    # Chance.

    def uniform(self, generator: np.random.Generator, shape: Shape, dtype: Any) -> Array:
        return generator.random(dtype=dtype, out=self.new(shape, dtype))


@lru_cache(maxsize=1024)
def _reduced_shape(shape: Shape, axes: Shape, keepdims: bool) -> Shape:
    gone = {axis % len(shape) for axis in axes}
    return tuple(1 if i in gone else n for i, n in enumerate(shape) if keepdims or i not in gone)


@lru_cache(maxsize=1024)
def _row_starts(rows: int, classes: int) -> Array:
    return np.arange(0, rows * classes, classes)


_default: Backend = NumpyBackend()


def default_backend() -> Backend:
    """Return the back end of new tensors; an operation uses the back end of its operands."""
    return _default


def set_default_backend(backend: Backend) -> Backend:
    """Make `backend` the default in all threads, and return the previous one."""
    global _default
    before, _default = _default, backend
    return before
