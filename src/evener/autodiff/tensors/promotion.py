"""Which element type two operands meet in: PyTorch's rules.

Floating beats integer beats bool. Of two types of one kind the wider wins, but a number or a tensor without dimensions
never widens a tensor with dimensions.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from evener.autodiff.errors import InvalidOperation, require

if TYPE_CHECKING:
    from evener.autodiff.tensors.base import TensorBase

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
    """Raise InvalidOperation unless both are floating-point: integers are never converted unasked."""
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
