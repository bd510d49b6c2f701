"""Tensors: what they can do, and how they are made."""

from evener.autodiff.tensors.creation import arange, cat, from_numpy, full, ones, stack, tensor, where, zeros
from evener.autodiff.tensors.tensor import Tensor, apply

__all__ = ["Tensor", "apply", "arange", "cat", "from_numpy", "full", "ones", "stack", "tensor", "where", "zeros"]
