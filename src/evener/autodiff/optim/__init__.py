"""Optimisers: one fused pass over the flat buffers."""

from evener.autodiff.optim.optimizer import SGD, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
