"""Tensors: what they can do, and how they are made."""
