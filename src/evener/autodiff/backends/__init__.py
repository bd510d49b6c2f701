"""Array back ends of the thin engine: NumPy by default, PyTorch on request."""
