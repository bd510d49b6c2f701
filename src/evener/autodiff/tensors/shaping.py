"""The part of a tensor's interface that tells what it holds and moves elements without computing."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Self

import numpy as np

from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.tensors.base import DEFAULT_FLOAT, DEFAULT_INTEGER, TensorBase


class Shaping(TensorBase):
    """Sizes, ways out of the library, shapes, transposition and indexing."""

    __slots__ = ()

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[self._dim(dim)]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return prod(self._array.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Its elements. Shares memory outside an arena; inside one it is a copy, which outlives the arena."""
        if self._edge is not None:
            raise InvalidOperation("a tensor that requires a gradient has no numpy(); call detach().numpy()")
        array = self._lease.backend.to_numpy(self._usable())
        return array if self._lease.number == 0 else array.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def item(self) -> Any:
        """The only element, as a Python number."""
        require(self.numel() == 1, "item() needs exactly one element; the tensor has shape {}", self.shape)
        return self._lease.backend.to_numpy(self._usable()).item()

    def tolist(self) -> Any:
        """Its elements as nested lists of Python numbers."""
        return self._lease.backend.to_numpy(self._usable()).tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        if not self._lease.alive:
            return f"tensor(of iteration {self._lease.number} of an arena, which is over)"
        body = np.array2string(self._lease.backend.to_numpy(self._array), separator=", ", prefix="tensor(")
        notes = [] if self.dtype in (DEFAULT_FLOAT, DEFAULT_INTEGER, bool) else [f"dtype={self.dtype}"]
        return f"tensor({', '.join([body, *notes, *['requires_grad=True'] * (self._edge is not None)])})"

    def reshape(self, *shape: int | tuple[int, ...]) -> Self:
        """The same elements in another shape; one size may be -1, which stands for what is left."""
        return self._apply("reshape", (), _filled(self.shape, flat_sizes(shape)))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Dimensions from `start_dim` to `end_dim` as one."""
        start, end = self._dim(start_dim), self._dim(end_dim)
        require(start <= end, "start_dim must not lie behind end_dim, got {} and {}", start_dim, end_dim)
        shape = self.shape
        return self._apply("reshape", (), (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))

    def squeeze(self, dim: int | None = None) -> Self:
        """Without dimensions of size 1: all of them, or `dim` if it is one."""
        chosen = self._dims(dim)
        shape = tuple(size for i, size in enumerate(self.shape) if size != 1 or i not in chosen)
        return self._apply("reshape", (), shape)

    def unsqueeze(self, dim: int) -> Self:
        """With a dimension of size 1 inserted at `dim`."""
        size = self.ndim + 1
        require(-size <= dim < size, "dim must be from {} to {}, got {}", -size, size - 1, dim)
        at = dim % size
        return self._apply("reshape", (), (*self.shape[:at], 1, *self.shape[at:]))

    def permute(self, *dims: int | tuple[int, ...]) -> Self:
        """Dimensions in the order `dims`."""
        order = tuple(self._dim(dim) for dim in flat_sizes(dims))
        require(
            sorted(order) == list(range(self.ndim)), "dims must name each of {} dimensions, got {}", self.ndim, order
        )
        return self._apply("transpose", (), order)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Two dimensions exchanged."""
        order = list(range(self.ndim))
        a, b = self._dim(dim0), self._dim(dim1)
        if a != b:
            order[a], order[b] = order[b], order[a]
        return self._apply("transpose", (), tuple(order))

    @property
    def T(self) -> Self:
        """A matrix transposed."""
        require(self.ndim <= 2, "T is for matrices; this tensor has shape {}: use transpose(dim0, dim1)", self.shape)
        return self._apply("transpose", (), tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Self:
        """The last two dimensions exchanged."""
        return self.transpose(-2, -1)

    def expand(self, *shape: int | tuple[int, ...]) -> Self:
        """Repeated along dimensions of size 1, without copying; -1 keeps a size."""
        wanted = flat_sizes(shape)
        lead = len(wanted) - self.ndim
        require(lead >= 0, "expand needs at least {} sizes, got {}", self.ndim, wanted)
        kept = (old if new == -1 else new for old, new in zip(self.shape, wanted[lead:], strict=True))
        return self._apply("expand", (), (*wanted[:lead], *kept))

    def __getitem__(self, index: Any) -> Self:
        parts = tuple(self._index_part(part) for part in (index if isinstance(index, tuple) else (index,)))
        if any(map(_is_array, parts)) and any(isinstance(part, int) for part in parts):
            # NumPy would take integers beside an array for arrays, which moves dimensions; PyTorch does not.
            numbers_first = (one for part in parts for one in _until_arrays(part))
            then_arrays = tuple(_after_numbers(part) for part in parts if not isinstance(part, int))
            return self._apply("index", (), tuple(numbers_first))._apply("index", (), then_arrays)
        return self._apply("index", (), parts)

    def _index_part(self, part: Any) -> Any:
        if isinstance(part, TensorBase):
            return part._usable()
        if part is None or part is Ellipsis or isinstance(part, slice | int):
            return part
        return self._lease.backend.from_numpy(_index_array(part))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def gather(self, dim: int, index: Self) -> Self:
        """Elements at `index` along `dim`: result[i][j] = self[index[i][j]][j] for dim 0; index[i] as long as self."""
        return self._apply("gather", (), index._usable(), self._dim(dim))


def _is_array(part: Any) -> bool:
    return hasattr(part, "shape")


def _until_arrays(part: Any) -> tuple[Any, ...]:
    """A part of an index while its arrays wait: whole dimensions in their place, as many as a mask covers."""
    if not _is_array(part):
        return (part,)
    return (slice(None),) * (len(part.shape) if "bool" in str(part.dtype) else 1)


def _after_numbers(part: Any) -> Any:
    """A part of an index when all but its arrays have been followed."""
    return part if _is_array(part) or part is Ellipsis else slice(None)


def _index_array(part: Any) -> Any:
    array = np.asarray(part)
    if array.dtype.kind not in "biu":
        raise InvalidOperation(f"an index must be made of integers, slices, truth values, None or ..., got {part!r}")
    return array


def flat_sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given one by one, or as one tuple or list."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        return tuple(sizes[0])
    return sizes


def _filled(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` with -1 replaced by the size that is left."""
    count = prod(shape)
    known = prod(size for size in wanted if size != -1)
    unknown = wanted.count(-1)
    fits = known == count if unknown == 0 else unknown == 1 and known > 0 and count % known == 0
    require(fits and min(wanted, default=0) >= -1, "a tensor of shape {} cannot be reshaped to {}", shape, wanted)
    return tuple(count // known if size == -1 else size for size in wanted)
