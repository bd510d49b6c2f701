"""The part of a tensor's interface that works element by element, and matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.autodiff.errors import require
from evener.autodiff.tensors.promotion import Number
from evener.autodiff.tensors.reducing import Reducing

if TYPE_CHECKING:
    from evener.autodiff.tensors.tensor import Tensor


class Arithmetic(Reducing):
    """Operators, comparisons, elementwise functions and matrix products."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __add__(self, other: Tensor | Number) -> Tensor:
        return self._with("add", other)

    __radd__ = __add__

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return self._with("subtract", other)

    def __rsub__(self, other: Number) -> Tensor:
        return self._number(other)._with("subtract", self)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return self._with("multiply", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return self._floating()._with("divide", other)

    def __rtruediv__(self, other: Number) -> Tensor:
        return self._floating()._number(other)._with("divide", self._floating())

    def __pow__(self, other: Tensor | Number) -> Tensor:
        return self._with("power", other)

    def __rpow__(self, other: Number) -> Tensor:
        return self._number(other)._with("power", self)

    def __neg__(self) -> Tensor:
        return self._apply("negative")

    def __abs__(self) -> Tensor:
        return self._apply("absolute")

    def __eq__(self, other: Tensor | Number) -> Tensor:  # type: ignore[override]
        return self._with("compare", other, "==")

    def __ne__(self, other: Tensor | Number) -> Tensor:  # type: ignore[override]
        return self._with("compare", other, "!=")

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return self._with("compare", other, "<")

    def __le__(self, other: Tensor | Number) -> Tensor:
        return self._with("compare", other, "<=")

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return self._with("compare", other, ">")

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return self._with("compare", other, ">=")

    def pow(self, exponent: Tensor | Number) -> Tensor:
        """Each element to the power of `exponent`."""
        return self._with("power", exponent)

    def maximum(self, other: Tensor) -> Tensor:
        """The larger of both; where both are equal, each gets half of the gradient."""
        return self._with("maximum", other)

    def abs(self) -> Tensor:
        """Absolute value; the gradient at 0 is 0."""
        return self._apply("absolute")

    def exp(self) -> Tensor:
        """e to the power of each element."""
        return self._floating()._apply("exp")

    def log(self) -> Tensor:
        """Natural logarithm."""
        return self._floating()._apply("log")

    def sqrt(self) -> Tensor:
        """Square root."""
        return self._floating()._apply("sqrt")

    def tanh(self) -> Tensor:
        """Hyperbolic tangent."""
        return self._floating()._apply("tanh")

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._floating()._apply("sigmoid")

    def relu(self) -> Tensor:
        """The larger of x and 0; the gradient at 0 is 0."""
        return self._apply("relu")

    def matmul(self, other: Tensor) -> Tensor:
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
