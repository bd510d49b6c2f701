"""Initial values of parameters."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from evener.autodiff.graph import no_grad
from evener.autodiff.tensors.creation import generator
from evener.autodiff.tensors.tensor import Tensor


@no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Fill with uniform numbers from `a` to `b`."""
    return tensor.copy_(generator().uniform(a, b, tensor.shape))


@no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill with normally distributed numbers."""
    return tensor.copy_(generator().normal(mean, std, tensor.shape))


@no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with one number."""
    return tensor.copy_(np.full(tensor.shape, val))


def xavier_uniform_(weight: Tensor) -> Tensor:
    """Uniform within sqrt(6 / (inputs + outputs)); Glorot and Bengio 2010."""
    bound = sqrt(6 / (fan_in(weight) + weight.shape[0] * prod(weight.shape[2:])))
    return uniform_(weight, -bound, bound)


def by_fan_in_(tensor: Tensor, inputs: int) -> Tensor:
    """Fill uniformly within 1 / sqrt(inputs), as PyTorch does for linear layers and convolutions."""
    bound = 1 / sqrt(inputs) if inputs else 0.0
    return uniform_(tensor, -bound, bound)


def fan_in(weight: Tensor) -> int:
    """Return the number of inputs of one output of a weight [O, I, ...]."""
    return prod(weight.shape[1:])
