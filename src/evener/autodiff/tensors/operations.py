"""The part of a tensor's interface that computes: element by element, over dimensions, products, shapes, indexing."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.tensors.base import Number, TensorBase

T = TypeVar("T")
B = TypeVar("B", bound=TensorBase)
Dims = int | tuple[int, ...] | None


class Largest(NamedTuple, Generic[T]):
    """The result of `max` along a dimension.

    Attributes:
        values: the largest elements.
        indices: where they are, the first of equal ones.
    """

    values: T
    indices: T


def _operator(rule: str, *arguments: object) -> Callable[[B, B | Number], B]:
    """Return a method that applies the row `rule` to the tensor and another or a number."""

    def method(self: B, other: B | Number) -> B:
        return self._with(rule, other, *arguments)

    return method


def _reflected(rule: str) -> Callable[[B, Number], B]:
    """Return a method that applies the row `rule` to a number and the tensor."""

    def method(self: B, other: Number) -> B:
        return self._number(other)._with(rule, self)

    return method


def _function(rule: str) -> Callable[[B], B]:
    """Return a method that applies the row `rule` to the tensor, as floating-point numbers."""

    def method(self: B) -> B:
        return self._floating()._apply(rule)

    return method


class Operations(TensorBase):
    """Operators, comparisons, elementwise functions, matrix products, reductions; shapes, transposition, indexing."""

    __slots__ = ()
    __hash__ = object.__hash__

    __add__ = __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("subtract"), _reflected("subtract")
    __mul__ = __rmul__ = _operator("multiply")
    __pow__, __rpow__ = _operator("power"), _reflected("power")
    __eq__, __ne__ = _operator("compare", "=="), _operator("compare", "!=")  # type: ignore[assignment]
    __lt__, __le__ = _operator("compare", "<"), _operator("compare", "<=")
    __gt__, __ge__ = _operator("compare", ">"), _operator("compare", ">=")

    def __truediv__(self, other: Self | Number) -> Self:
        return self._floating()._with("divide", other)

    def __rtruediv__(self, other: Number) -> Self:
        return self._floating()._number(other)._with("divide", self._floating())

    def __neg__(self) -> Self:
        return self._apply("negative")

    def abs(self) -> Self:
        """Absolute value; the gradient at 0 is 0."""
        return self._apply("absolute")

    __abs__ = abs

    pow = __pow__
    """Each element to the power of another, or of a number."""
    maximum = _operator("maximum")
    """The larger of both; where both are equal, each gets half of the gradient."""
    exp = _function("exp")
    """e to the power of each element."""
    log = _function("log")
    """Natural logarithm."""
    sqrt = _function("sqrt")
    """Square root."""
    tanh = _function("tanh")
    """Hyperbolic tangent."""
    sigmoid = _function("sigmoid")
    """1 / (1 + exp(-x))."""

    def relu(self) -> Self:
        """The larger of x and 0; the gradient at 0 is 0."""
        return self._apply("relu")

    def matmul(self, other: Self) -> Self:
        """Matrix product of the last two dimensions; those before them broadcast, vectors are rows or columns."""
        require(self.ndim > 0 and other.ndim > 0, "matmul needs vectors, matrices or stacks of them, got a number")
        a = self.unsqueeze(0) if self.ndim == 1 else self
        b = other.unsqueeze(1) if other.ndim == 1 else other
        fits = a._array.shape[-1] == b._array.shape[-2]
        require(fits, "matmul needs as many columns as rows after it, got shapes {} and {}", self.shape, other.shape)
        if a.ndim > 2 and b.ndim == 2:  # one product instead of a stack of them
            product = a.reshape(-1, a.shape[-1])._with("matmul", b).reshape(*a.shape[:-1], b.shape[-1])
        else:
            product = a._with("matmul", b)
        if other.ndim == 1:
            product = product.squeeze(-1)
        return product.squeeze(-2 if other.ndim > 1 else -1) if self.ndim == 1 else product

    __matmul__ = matmul

    def sum(self, dim: Dims = None, keepdim: bool = False) -> Self:
        """Sum over `dim`, or over everything."""
        return self._summable()._apply("sum", (), self._dims(dim), keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Self:
        """Mean over `dim`, or over everything."""
        return self._floating()._apply("mean", (), self._dims(dim), keepdim)

    def amax(self, dim: Dims = None, keepdim: bool = False) -> Self:
        """Largest over `dim`, or of all; equal ones share the gradient."""
        self._check_not_empty("amax")
        return self._apply("max", (), self._dims(dim), keepdim)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Self | Largest[Self]:
        """Largest of all; or along `dim`, with indices: the first of equal ones gets the gradient."""
        if dim is None:
            return self.amax()
        indices = self.argmax(dim, keepdim=True)
        values = self._apply("gather", (), indices._array, self._dim(dim))
        return Largest(values, indices) if keepdim else Largest(values.squeeze(dim), indices.squeeze(dim))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """Index of the first largest along `dim`, or among all elements in order."""
        self._check_not_empty("argmax")
        if dim is None:
            return self.reshape(-1).argmax(0)
        return self._along("argmax", dim, keepdim)

    def softmax(self, dim: int) -> Self:
        """exp(x) over its sum along `dim`."""
        return self._floating()._along("softmax", dim)

    def log_softmax(self, dim: int) -> Self:
        """Logarithm of the softmax along `dim`."""
        return self._floating()._along("log_softmax", dim)

    def _along(self, rule: str, dim: int, *arguments: object) -> Self:
        """The row `rule` along one dimension; a number counts as a row of one."""
        at = self._dim(dim)
        if self.ndim == 0:
            return self.reshape(1)._apply(rule, (), 0, *arguments).reshape(())
        return self._apply(rule, (), at, *arguments)

    def _check_not_empty(self, operation: str) -> None:
        require(0 not in self.shape, "{} of no elements is not defined; the tensor has shape {}", operation, self.shape)

    def reshape(self, *shape: int | tuple[int, ...]) -> Self:
        """Return the same elements in another shape; one size may be -1 for the remaining elements."""
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
        sizes = (old if new == -1 else new for old, new in zip(self.shape, wanted[lead:], strict=True))
        return self._apply("expand", (), (*wanted[:lead], *sizes))

    def __getitem__(self, index: Any) -> Self:
        parts = tuple(self._index_part(part) for part in (index if isinstance(index, tuple) else (index,)))
        if any(map(_is_array, parts)) and any(isinstance(part, int) for part in parts):
            # NumPy would take integers beside an array for arrays, which moves dimensions; PyTorch does not.
            numbers_first = (number for part in parts for number in _until_arrays(part))
            then_arrays = tuple(_after_numbers(part) for part in parts if not isinstance(part, int))
            return self._apply("index", (), tuple(numbers_first))._apply("index", (), then_arrays)
        return self._apply("index", (), parts)

    def _index_part(self, part: Any) -> Any:
        if isinstance(part, TensorBase):
            return part._usable()
        if part is None or part is Ellipsis or isinstance(part, slice | int):
            return part
        return self._lease.backend.from_numpy(_index_array(part))

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
