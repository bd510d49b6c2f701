"""The base of a tensor's interface: an array, its lease, its type, and the application of an operation.

The type in which two operands meet is PyTorch's: floating beats integer beats bool. Of two types of one kind the wider
wins, but a number or a tensor without dimensions never widens a tensor with dimensions.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import numpy as np

from evener.autodiff.backends.interface import Array, Lease
from evener.autodiff.errors import InvalidOperation, TensorExpired, require
from evener.autodiff.graph import Leaf, Node

Number = bool | int | float

DEFAULT_FLOAT = np.dtype(np.float32)
DEFAULT_INTEGER = np.dtype(np.int64)
_RANK = {"b": 0, "u": 1, "i": 1, "f": 2}


@cache
def check_type(dtype: Any) -> np.dtype[Any]:
    """`dtype` as one of NumPy's in native byte order.

    Raises:
        InvalidOperation: it is not bool, an integer, float32 or float64.
    """
    kind: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if kind.kind not in _RANK or kind == np.float16 or kind.itemsize > 8:
        raise InvalidOperation(f"elements must be bool, integers, float32 or float64, got {kind}")
    return kind


def number_type(value: object) -> np.dtype[Any]:
    """The type of a tensor made from a Python number."""
    if isinstance(value, bool | np.bool_):
        return np.dtype(bool)
    return DEFAULT_INTEGER if isinstance(value, int | np.integer) else DEFAULT_FLOAT


def meet_number(dtype: np.dtype[Any], value: object) -> np.dtype[Any]:
    """The type in which a tensor of `dtype` meets a Python number."""
    other = number_type(value)
    return other if _RANK[other.kind] > _RANK[dtype.kind] else dtype


def require_floats(operation: str, first: TensorBase, weight: TensorBase) -> None:
    """Raise InvalidOperation unless both are floating-point: integers are never converted implicitly."""
    fits = first.dtype.kind == weight.dtype.kind == "f"
    require(
        fits, "{} needs floating-point input and weights, got {} and {}: use to()", operation, first.dtype, weight.dtype
    )


def meet(a: TensorBase, b: TensorBase) -> np.dtype[Any]:
    """The type in which two tensors meet."""
    kind_a, kind_b = a.dtype, b.dtype
    rank_a, rank_b = _RANK[kind_a.kind], _RANK[kind_b.kind]
    if rank_a != rank_b:
        return kind_a if rank_a > rank_b else kind_b
    if (a.ndim == 0) != (b.ndim == 0):
        return kind_b if a.ndim == 0 else kind_a
    return np.promote_types(kind_a, kind_b)


class TensorBase:
    """An array that remembers how it was computed; `operations` stands on it, and `tensor` on that.

    `Self` in their signatures is Tensor, which what is computed from a Parameter is too.
    """

    __slots__ = ("_array", "_edge", "_lease")

    def __init__(self, array: Array, lease: Lease, edge: Node | Leaf | None = None) -> None:
        self._array, self._lease, self._edge = array, lease, edge

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of every dimension."""
        return tuple(self._array.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        kind: np.dtype[Any] = self._lease.backend.numpy_type(self._array.dtype)
        return kind

    def to(self, dtype: Any) -> Self:
        """Converted to another element type; itself if it has it already."""
        wanted = check_type(dtype)
        if wanted == self.dtype:
            return self
        return self._apply("convert", (), self._lease.backend.native(wanted))

    def _apply(self, rule: str, others: tuple[TensorBase, ...] = (), *arguments: Any) -> Self:
        """The row `rule` of the table, applied to this tensor and `others`."""
        raise NotImplementedError

    def _made(self, array: Array) -> Self:
        """A new tensor of this one's back end that holds `array`."""
        raise NotImplementedError

    def _with(self, rule: str, other: TensorBase | Number, *arguments: object) -> Self:
        """The row `rule` applied to this tensor and `other`, both converted to the type in which they meet."""
        if not isinstance(other, TensorBase):
            other = self._number(other)
        if other._array.dtype == self._array.dtype:
            return self._apply(rule, (other,), *arguments)
        dtype = meet(self, other)
        return self.to(dtype)._apply(rule, (other.to(dtype),), *arguments)

    def _number(self, value: Number) -> Self:
        """`value` as a tensor without dimensions, in the type in which it meets this one."""
        if not isinstance(value, bool | int | float | np.generic):
            raise TypeError(f"a tensor goes together with tensors and numbers, got {type(value).__name__}")
        backend = self._lease.backend
        dtype = backend.native(meet_number(self.dtype, value))
        return self._made(backend.fill(backend.new((), dtype), value))

    def _floating(self) -> Self:
        """This tensor, converted to float32 if its elements are integers or bool."""
        return self.to(self.dtype if self.dtype.kind == "f" else DEFAULT_FLOAT)

    def _summable(self) -> Self:
        """This tensor, converted to int64 if its elements are smaller integers or bool."""
        return self.to(self.dtype if self.dtype.kind == "f" else DEFAULT_INTEGER)

    def _usable(self) -> Array:
        """Its array. Raises TensorExpired after the arena that holds it has been reset."""
        if not self._lease.alive:
            raise expired(self._lease)
        return self._array

    def _dims(self, dim: int | tuple[int, ...] | None) -> tuple[int, ...]:
        """`dim` as dimensions counted from the front; all of them for None."""
        if dim is None:
            return tuple(range(self.ndim))
        dims = tuple(self._dim(item) for item in (dim if isinstance(dim, tuple | list) else (dim,)))
        require(len(set(dims)) == len(dims), "each dimension can be named once, got {}", dim)
        return dims if self.ndim else ()

    def _dim(self, dim: int) -> int:
        """`dim` counted from the front; a number has a dimension 0 too. Raises IndexError where there is none."""
        size = max(self.ndim, 1)
        if not -size <= dim < size:
            raise IndexError(f"dim must be from {-size} to {size - 1} for a tensor of shape {self.shape}, got {dim}")
        return dim % size


def expired(lease: Lease) -> TensorExpired:
    """Return the error for a tensor of an arena's finished iteration."""
    return TensorExpired(
        f"this tensor was made in iteration {lease.number} of an arena, which is over, and its memory holds something "
        "else: take what you need inside `with arena:` with item() or numpy()"
    )
