"""Optimisers: one fused pass over the flat buffers."""

from evener.autodiff.optim.algorithms import SGD, Adam, AdamW
from evener.autodiff.optim.optimizer import Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
