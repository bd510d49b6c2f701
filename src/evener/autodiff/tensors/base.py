"""What every part of a tensor's interface stands on: an array, its lease, its type, and the way to an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from evener.autodiff.backends.interface import Array, Lease
from evener.autodiff.errors import TensorExpired, require
from evener.autodiff.graph import Collector, Node
from evener.autodiff.tensors.promotion import DEFAULT_FLOAT, DEFAULT_INTEGER, Number, check_type, meet, meet_number

if TYPE_CHECKING:
    from evener.autodiff.tensors.tensor import Tensor


class TensorBase:
    """An array that remembers how it was computed.

    The interface is a stack of files: `shaping` stands on this one, then come `reducing`, `arithmetic`, `reading`,
    and `tensor`.
    """

    __slots__ = ("_array", "_edge", "_lease")

    def __init__(self, array: Array, lease: Lease, edge: Node | Collector | None = None) -> None:
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
        return self._lease.backend.numpy_type(self._array.dtype)

    def to(self, dtype: Any) -> Tensor:
        """Converted to another element type; itself if it has it already."""
        wanted = check_type(dtype)
        if wanted == self.dtype:
            return self  # type: ignore[return-value]
        return self._apply("convert", (), self._lease.backend.native(wanted))

    def _apply(self, rule: str, others: tuple[TensorBase, ...] = (), *arguments: Any) -> Tensor:
        """The row `rule` of the table, applied to this tensor and `others`."""
        raise NotImplementedError

    def _made(self, array: Array) -> Tensor:
        """A new tensor of this one's back end that holds `array`."""
        raise NotImplementedError

    def _with(self, rule: str, other: TensorBase | Number, *arguments: object) -> Tensor:
        """The row `rule` applied to this tensor and `other`, both converted to the type in which they meet."""
        if not isinstance(other, TensorBase):
            other = self._number(other)
        if other._array.dtype == self._array.dtype:
            return self._apply(rule, (other,), *arguments)
        dtype = meet(self, other)
        return self.to(dtype)._apply(rule, (other.to(dtype),), *arguments)

    def _number(self, value: Number) -> Tensor:
        """`value` as a tensor without dimensions, in the type in which it meets this one."""
        if not isinstance(value, bool | int | float | np.generic):
            raise TypeError(f"a tensor goes together with tensors and numbers, got {type(value).__name__}")
        backend = self._lease.backend
        dtype = backend.native(meet_number(self.dtype, value))
        return self._made(backend.fill(backend.new((), dtype), value))

    def _floating(self) -> Tensor:
        """This tensor, converted to float32 if its elements are integers or bool."""
        return self.to(self.dtype if self.dtype.kind == "f" else DEFAULT_FLOAT)

    def _summable(self) -> Tensor:
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
        dims = tuple(self._dim(one) for one in (dim if isinstance(dim, tuple | list) else (dim,)))
        require(len(set(dims)) == len(dims), "each dimension can be named once, got {}", dim)
        return dims if self.ndim else ()

    def _dim(self, dim: int) -> int:
        """`dim` counted from the front; a number has a dimension 0 too. Raises IndexError where there is none."""
        size = max(self.ndim, 1)
        if not -size <= dim < size:
            raise IndexError(f"dim must be from {-size} to {size - 1} for a tensor of shape {self.shape}, got {dim}")
        return dim % size


def expired(lease: Lease) -> TensorExpired:
    """The error for a tensor of an arena's iteration that is over."""
    return TensorExpired(
        f"this tensor was made in iteration {lease.number} of an arena, which is over, and its memory holds something "
        "else: take what you need inside `with arena:` with item() or numpy()"
    )
