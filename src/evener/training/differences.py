"""Differences between values that should be the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

_MEAN, _VARIANCE = "running_mean", "running_var"


class Difference(msgspec.Struct, frozen=True):
    """The difference of two values.

    Attributes:
        what: in words, with the name of the parameter.
        off: the largest difference, relative to the largest value.
    """

    what: str
    off: float


def as_real(tensor: Tensor) -> Tensor:
    """Return `tensor` as real numbers; complex numbers become pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value."""
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def statistic_size(name: str, state: Mapping[str, Tensor]) -> float:
    """Return the size of the values behind a running mean; 0 for other tensors.

    A mean of values that cancel out, such as of what a BatchNorm has normalised, is a rounding error of theirs.
    """
    variance = state.get(f"{name.removesuffix(_MEAN)}{_VARIANCE}") if name.endswith(_MEAN) else None
    return 0.0 if variance is None else math.sqrt(largest(variance))


def off_by(value: Tensor, expected: Tensor, scale: float) -> float:
    """Return the largest difference, relative to `scale`; infinity where only one of two values is a number."""
    if value.shape != expected.shape:
        return math.inf
    alike = (value == expected) | (value.isnan() & expected.isnan())
    off = largest((value.double() - expected.double()).abs().masked_fill(alike, 0.0))
    relative = off / max(scale, 1e-30) if off else 0.0
    return math.inf if math.isnan(relative) else relative
