"""Optimisers: one fused pass over the flat buffers."""

from evener.autodiff.optim.adam import Adam, AdamW
from evener.autodiff.optim.optimizer import Optimizer
from evener.autodiff.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
