"""Functions that work on each element, or along one dimension, of whatever shape."""

from __future__ import annotations

from evener.autodiff.errors import require
from evener.autodiff.randomness import generator
from evener.autodiff.tensors import Tensor, apply


def relu(x: Tensor) -> Tensor:
    """The larger of x and 0."""
    return apply("relu", (x,))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.sigmoid()


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return x.tanh()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x; `approximate` "tanh" for the older formula."""
    require(approximate in ("none", "tanh"), "approximate must be 'none' or 'tanh', got {!r}", approximate)
    return apply("gelu" if approximate == "none" else "gelu_tanh", (x._floating(),))


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) over its sum along `dim`."""
    return x.softmax(dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """Logarithm of the softmax along `dim`."""
    return x.log_softmax(dim)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """In training: each element 0 with probability p, else divided by 1 - p, so that the mean stays."""
    require(0 <= p <= 1, "p must be from 0 to 1, got {}", p)
    return apply("dropout", (x,), p, generator()) if training and p > 0 else x
