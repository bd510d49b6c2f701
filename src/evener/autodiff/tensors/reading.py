"""The part of a tensor's interface that tells what it holds: sizes, numbers, NumPy arrays."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.tensors.arithmetic import Arithmetic
from evener.autodiff.tensors.promotion import DEFAULT_FLOAT, DEFAULT_INTEGER


class Reading(Arithmetic):
    """Sizes, and ways out of the library."""

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
