"""The built-in tasks once more, for machines without PyTorch: models of `evener.autodiff` and NumPy arrays."""
