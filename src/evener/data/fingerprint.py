"""A number that stands for a sample, a batch or a tensor, by which nodes compare what they hold.

    floats     sum of x_i * w_i, with weights from 1 to 2: values that differ by rounding have prints that do, too
    integers   sum of x_i * w_i modulo 2**64, mixed: one that differs by 1 gives another print, however large the others

The weight of position i is a pseudo-random number for i modulo `_ROW`, times another one for the row i // `_ROW`. So no
weight repeats, and the weights of any number of positions come from two short tables.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evener.system.accelerators import on_host
from evener.tracer.nested import values_in

_ROW = 2**14
"""Numbers that share the second factor of their weights."""
_ROWS_AT_ONCE = 64
"""Rows that are converted at once, which bounds the memory that a print takes."""
_UNIT = 2.0**-64
_NOT_FINITE = {"nan": 1.7, "posinf": 2.3, "neginf": -2.3}
"""Stand-ins for values that are not finite, relative to the largest finite one."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Distance of the numbers of SplitMix64."""


class _Weights(NamedTuple):
    """Pseudo-random weights, as numbers from 1 to 2 and as odd integers; both of shape (N,)."""

    floats: Tensor
    integers: Tensor


@cache
def _weights(seed: int, count: int) -> _Weights:
    bits = _mix(np.arange(count, dtype=np.uint64) * _STEP + np.uint64(seed)).view(np.int64) | 1
    return _Weights(torch.from_numpy(1.5 + bits * _UNIT), torch.from_numpy(bits))


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed bits: the finalizer of SplitMix64, which is the same with every version of NumPy."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(multiplier)
    return bits ^ (bits >> np.uint64(31))


def print_of(value: Any) -> float:
    """Return a number that differs for different values, and for the same values in another order.

    Values that are equal but for rounding have prints that are equal but for rounding. Texts count as integers;
    other objects do not count.

    Args:
        value: a tensor, an array, a number or a text; or any nesting of these in tuples, lists and dicts.
    """
    total, size, mixed, first, has_integers = 0.0, 0.0, 0, 0, False
    for numbers in _all_numbers(value):
        count = numbers.numel()
        if numbers.dtype == torch.int64:
            mixed += _sum_of(numbers, first)
            has_integers = has_integers or count > 0
        else:
            finite = _finite(numbers)
            total += _sum_of(finite, first)
            size += float(finite.abs().sum(dtype=torch.float64))
        first += count + 1  # so that where one tensor ends and the next one begins counts, too
    if not has_integers:
        return total
    share = float(_mix(np.array([mixed % 2**64], dtype=np.uint64))[0] * _UNIT)
    return total + (size or 1.0) * (1.0 + share)


def _sum_of(numbers: Tensor, first: int) -> Any:
    """Return the weighted sum of numbers of shape (N,), the first of which has position `first`."""
    is_integer, total = numbers.dtype == torch.int64, 0 if numbers.dtype == torch.int64 else 0.0
    position, end = first, first + len(numbers)
    while position < end:
        row, column = divmod(position, _ROW)
        num_rows = 1 if column or end - position < _ROW else min(_ROWS_AT_ONCE, (end - position) // _ROW)
        count = min(num_rows * _ROW - column, end - position)
        table = _weights(0, _ROW)
        of_rows = _weights(1, _tables_for(row + num_rows))
        block = numbers[position - first : position - first + count].reshape(num_rows, -1)
        if is_integer:
            rows = (block * table.integers[column : column + block.shape[1]]).sum(1)
            total += int((rows * of_rows.integers[row : row + num_rows]).sum())
        else:
            rows = block.double() @ table.floats[column : column + block.shape[1]]
            total += float(rows @ of_rows.floats[row : row + num_rows])
        position += count
    return total


def _tables_for(rows: int) -> int:
    """Return the length of the table of rows: a power of 2, so that few tables are made."""
    return max(1024, 1 << (rows - 1).bit_length())


def _finite(numbers: Tensor) -> Tensor:
    """Return `numbers` with stand-ins for those that are not finite."""
    finite = numbers.isfinite()
    if bool(finite.all()):
        return numbers
    numbers = numbers.double()
    scale = float(numbers[finite].abs().max()) if bool(finite.any()) else 0.0
    scale = min(scale, 1e300) or 1.0
    return numbers.nan_to_num(**{name: one * scale for name, one in _NOT_FINITE.items()})


def _all_numbers(value: Any) -> Iterator[Tensor]:
    """Yield the numbers of each item of a nested value, shape (N,), as int64 or as floats."""
    items: list[Any] = []
    for item in values_in(value):
        items += _dense(item.detach()) if isinstance(item, Tensor) else [item]
    copies = iter(on_host([item for item in items if isinstance(item, Tensor)]))
    for item in items:
        if isinstance(item, Tensor):
            yield _as_numbers(next(copies).flatten())
        elif isinstance(item, str | bytes):
            yield torch.tensor([zlib.crc32(item.encode(errors="surrogatepass") if isinstance(item, str) else item)])
        else:
            yield _of_array(item)


def _dense(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors that hold what `tensor` does; of a sparse one, indices and values."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout != torch.strided:
        sparse = (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()
        return [sparse.indices(), sparse.values()]
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor]


def _of_array(item: Any) -> Tensor:
    """Return the numbers of an array, an image or a number; empty if numbers cannot express it."""
    try:
        array = np.asarray(item)
        if array.dtype.kind == "c":
            array = np.stack([array.real, array.imag])
        array = array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)
        return torch.from_numpy(array.reshape(-1))
    except (TypeError, ValueError, OverflowError):
        return torch.empty(0)


def _as_numbers(numbers: Tensor) -> Tensor:
    return numbers if numbers.is_floating_point() else numbers.long()
