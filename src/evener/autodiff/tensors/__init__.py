"""Tensors: their operations and their creation."""
