"""The part of a tensor's interface that makes many elements one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from evener.autodiff.errors import require
from evener.autodiff.tensors.shaping import Shaping

if TYPE_CHECKING:
    from evener.autodiff.tensors.tensor import Tensor

Dims = int | tuple[int, ...] | None


class Largest(NamedTuple):
    """What `max` along a dimension gives.

    Attributes:
        values: the largest elements.
        indices: where they are, the first of equal ones.
    """

    values: Tensor
    indices: Tensor


class Reducing(Shaping):
    """Sums, means, largest elements, softmax."""

    __slots__ = ()

    def sum(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Sum over `dim`, or over everything."""
        return self._summable()._apply("sum", (), self._dims(dim), keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Mean over `dim`, or over everything."""
        return self._floating()._apply("mean", (), self._dims(dim), keepdim)

    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Largest over `dim`, or of all; equal ones share the gradient."""
        self._check_not_empty("amax")
        return self._apply("max", (), self._dims(dim), keepdim)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Tensor | Largest:
        """Largest of all; or along `dim`, with indices: the first of equal ones gets the gradient."""
        if dim is None:
            return self.amax()
        indices = self.argmax(dim, keepdim=True)
        values = self._apply("gather", (), indices._array, self._dim(dim))
        return Largest(values, indices) if keepdim else Largest(values.squeeze(dim), indices.squeeze(dim))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Index of the first largest along `dim`, or among all elements in order."""
        self._check_not_empty("argmax")
        if dim is None:
            return self.reshape(-1).argmax(0)
        return self._along("argmax", dim, keepdim)

    def softmax(self, dim: int) -> Tensor:
        """exp(x) over its sum along `dim`."""
        return self._floating()._along("softmax", dim)

    def log_softmax(self, dim: int) -> Tensor:
        """Logarithm of the softmax along `dim`."""
        return self._floating()._along("log_softmax", dim)

    def _along(self, rule: str, dim: int, *arguments: object) -> Tensor:
        """The row `rule` along one dimension; a number counts as a row of one."""
        at = self._dim(dim)
        if self.ndim == 0:
            return self.reshape(1)._apply(rule, (), 0, *arguments).reshape(())
        return self._apply(rule, (), at, *arguments)

    def _check_not_empty(self, operation: str) -> None:
        require(0 not in self.shape, "{} of no elements is not defined; the tensor has shape {}", operation, self.shape)
