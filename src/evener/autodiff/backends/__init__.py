"""Which arithmetic new tensors use: NumPy's, unless another back end is named.

    from evener.autodiff.backends.torch_backend import TorchBackend
    set_default_backend(TorchBackend("cuda"))

An operation computes with the back end of its operands; the default only decides for what is made from numbers.
"""

from __future__ import annotations

from evener.autodiff.backends.interface import Backend
from evener.autodiff.backends.numpy_backend import NumpyBackend

_default: Backend = NumpyBackend()


def default_backend() -> Backend:
    """The back end of tensors that are made from numbers."""
    return _default


def set_default_backend(backend: Backend) -> Backend:
    """Make `backend` the default one, in all threads, and return the one before."""
    global _default
    before, _default = _default, backend
    return before


__all__ = ["Backend", "NumpyBackend", "default_backend", "set_default_backend"]
