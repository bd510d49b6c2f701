"""Kinds of arrays that the thin engine computes with: NumPy's, and PyTorch's where it is asked for."""
