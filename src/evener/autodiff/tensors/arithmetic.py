"""The part of a tensor's interface that computes: element by element, over dimensions, and matrix products."""

from __future__ import annotations

from typing import Generic, NamedTuple, Self, TypeVar

from evener.autodiff.errors import require
from evener.autodiff.tensors.base import Number
from evener.autodiff.tensors.shaping import Shaping

T = TypeVar("T")
Dims = int | tuple[int, ...] | None


class Largest(NamedTuple, Generic[T]):
    """What `max` along a dimension gives.

    Attributes:
        values: the largest elements.
        indices: where they are, the first of equal ones.
    """

    values: T
    indices: T


class Arithmetic(Shaping):
    """Operators, comparisons, elementwise functions, matrix products, sums, means, largest elements, softmax."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __add__(self, other: Self | Number) -> Self:
        return self._with("add", other)

    __radd__ = __add__

    def __sub__(self, other: Self | Number) -> Self:
        return self._with("subtract", other)

    def __rsub__(self, other: Number) -> Self:
        return self._number(other)._with("subtract", self)

    def __mul__(self, other: Self | Number) -> Self:
        return self._with("multiply", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Self | Number) -> Self:
        return self._floating()._with("divide", other)

    def __rtruediv__(self, other: Number) -> Self:
        return self._floating()._number(other)._with("divide", self._floating())

    def __pow__(self, other: Self | Number) -> Self:
        return self._with("power", other)

    def __rpow__(self, other: Number) -> Self:
        return self._number(other)._with("power", self)

    def __neg__(self) -> Self:
        return self._apply("negative")

    def __abs__(self) -> Self:
        return self._apply("absolute")

    def __eq__(self, other: Self | Number) -> Self:  # type: ignore[override]
        return self._with("compare", other, "==")

    def __ne__(self, other: Self | Number) -> Self:  # type: ignore[override]
        return self._with("compare", other, "!=")

    def __lt__(self, other: Self | Number) -> Self:
        return self._with("compare", other, "<")

    def __le__(self, other: Self | Number) -> Self:
        return self._with("compare", other, "<=")

    def __gt__(self, other: Self | Number) -> Self:
        return self._with("compare", other, ">")

    def __ge__(self, other: Self | Number) -> Self:
        return self._with("compare", other, ">=")

    def pow(self, exponent: Self | Number) -> Self:
        """Each element to the power of `exponent`."""
        return self._with("power", exponent)

    def maximum(self, other: Self) -> Self:
        """The larger of both; where both are equal, each gets half of the gradient."""
        return self._with("maximum", other)

    def abs(self) -> Self:
        """Absolute value; the gradient at 0 is 0."""
        return self._apply("absolute")

    def exp(self) -> Self:
        """e to the power of each element."""
        return self._floating()._apply("exp")

    def log(self) -> Self:
        """Natural logarithm."""
        return self._floating()._apply("log")

    def sqrt(self) -> Self:
        """Square root."""
        return self._floating()._apply("sqrt")

    def tanh(self) -> Self:
        """Hyperbolic tangent."""
        return self._floating()._apply("tanh")

    def sigmoid(self) -> Self:
        """1 / (1 + exp(-x))."""
        return self._floating()._apply("sigmoid")

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
