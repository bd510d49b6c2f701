"""Tensors from numbers, arrays, and nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evener.autodiff.backends import default_backend
from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.tensors.base import DEFAULT_FLOAT, DEFAULT_INTEGER, Number, check_type, meet
from evener.autodiff.tensors.shaping import flat_sizes
from evener.autodiff.tensors.tensor import Tensor, apply


def tensor(data: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A tensor with a copy of `data`.

    Args:
        data: a number, nested lists of them, or an array. Python floats become float32, integers int64; arrays keep
            their type.
        dtype: of the elements, if another one is wanted.
        requires_grad: collect a gradient.
    """
    array = _array(data)
    given = isinstance(data, np.ndarray | np.generic)
    kind = check_type(dtype or (array.dtype if given or array.dtype.kind != "f" else DEFAULT_FLOAT))
    backend = default_backend()
    source = backend.from_numpy(array.astype(kind, copy=False))
    made = Tensor(backend.copy(source, backend.new(array.shape, source.dtype)), backend.place.lease)
    return made.requires_grad_() if requires_grad else made


def _array(data: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(data)
    except ValueError:
        raise InvalidOperation("nested lists must be of equal lengths at every depth, at most 64 deep") from None


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the memory of `array` (on a back end whose arrays are NumPy's)."""
    require(array.dtype == check_type(array.dtype), "from_numpy needs native byte order, got {}", array.dtype)
    backend = default_backend()
    return Tensor(backend.from_numpy(array), backend.permanent)


def full(size: Sequence[int], value: float, dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor filled with `value`."""
    require(min(size, default=0) >= 0, "sizes must not be negative, got {}", tuple(size))
    backend = default_backend()
    array = backend.fill(backend.new(tuple(size), backend.native(check_type(dtype))), value)
    made = Tensor(array, backend.place.lease)
    return made.requires_grad_() if requires_grad else made


def zeros(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros."""
    return full(flat_sizes(size), 0, dtype, requires_grad)


def ones(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor of ones."""
    return full(flat_sizes(size), 1, dtype, requires_grad)


def arange(start: float, end: float | None = None, step: float = 1, dtype: Any = None) -> Tensor:
    """Numbers from `start` (0 if only one is given) up to, not including, `end`."""
    array = np.arange(0, start, step) if end is None else np.arange(start, end, step)
    return tensor(array, dtype or (DEFAULT_INTEGER if array.dtype.kind == "i" else DEFAULT_FLOAT))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one behind the other along `dim`."""
    require(len(tensors) > 0, "cat needs at least one tensor")
    return apply("concatenate", tensors, tensors[0]._dim(dim))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape side by side along a new dimension `dim`."""
    return cat([one.unsqueeze(dim) for one in tensors], dim)


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where `condition`, else b; one of them may be a number."""
    if not isinstance(a, Tensor):
        require(isinstance(b, Tensor), "where needs at least one tensor besides the condition")
        a = b._number(a)  # type: ignore[union-attr]
    elif not isinstance(b, Tensor):
        b = a._number(b)
    kind = meet(a, b)  # type: ignore[arg-type]
    return apply("select", (condition, a.to(kind), b.to(kind)))  # type: ignore[union-attr]
