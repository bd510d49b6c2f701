"""Tensors from numbers, arrays, safetensors files, and at random.

The random state is one for the process, seeded by `manual_seed`, drawn from on the host whatever the back end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from evener.autodiff.backends.numpy_backend import default_backend
from evener.autodiff.errors import InvalidOperation, require
from evener.autodiff.tensors.base import DEFAULT_FLOAT, DEFAULT_INTEGER, Number, check_type, meet
from evener.autodiff.tensors.operations import flat_sizes
from evener.autodiff.tensors.tensor import Tensor, apply

if TYPE_CHECKING:
    from pathlib import Path


def tensor(data: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A tensor with a copy of `data`.

    Args:
        data: a number, nested lists of them, or an array. Python floats become float32, integers int64; arrays keep
            their type.
        dtype: of the elements, if another one is wanted.
        requires_grad: collect a gradient.
    """
    array = _array(data)
    is_array = isinstance(data, np.ndarray | np.generic)
    kind = check_type(dtype or (array.dtype if is_array or array.dtype.kind != "f" else DEFAULT_FLOAT))
    backend = default_backend()
    source = backend.from_numpy(array.astype(kind, copy=False))
    made = Tensor(backend.copy(source, backend.new(array.shape, source.dtype)), backend.place.lease)
    return made.requires_grad_() if requires_grad else made


def _array(data: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(data)
    except ValueError:
        raise InvalidOperation("nested lists must be of equal lengths at every depth, at most 64 deep") from None


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the memory of `array` (on a back end whose arrays are NumPy's)."""
    require(array.dtype == check_type(array.dtype), "from_numpy needs native byte order, got {}", array.dtype)
    backend = default_backend()
    return Tensor(backend.from_numpy(array), backend.permanent)


def full(size: Sequence[int], value: float, dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor filled with `value`."""
    require(min(size, default=0) >= 0, "sizes must not be negative, got {}", tuple(size))
    backend = default_backend()
    array = backend.fill(backend.new(tuple(size), backend.native(check_type(dtype))), value)
    made = Tensor(array, backend.place.lease)
    return made.requires_grad_() if requires_grad else made


def zeros(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros."""
    return full(flat_sizes(size), 0, dtype, requires_grad)


def ones(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """A tensor of ones."""
    return full(flat_sizes(size), 1, dtype, requires_grad)


def arange(start: float, end: float | None = None, step: float = 1, dtype: Any = None) -> Tensor:
    """Return numbers from `start` (0 if only `end` is passed) up to, not including, `end`."""
    array = np.arange(0, start, step) if end is None else np.arange(start, end, step)
    return tensor(array, dtype or (DEFAULT_INTEGER if array.dtype.kind == "i" else DEFAULT_FLOAT))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along `dim`."""
    require(len(tensors) > 0, "cat needs at least one tensor")
    return apply("concatenate", tensors, tensors[0]._dim(dim))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Stack tensors of one shape along a new dimension `dim`."""
    return cat([part.unsqueeze(dim) for part in tensors], dim)


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where `condition`, else b; one of them may be a number."""
    if not isinstance(a, Tensor):
        require(isinstance(b, Tensor), "where needs at least one tensor besides the condition")
        a = b._number(a)  # type: ignore[union-attr]
    elif not isinstance(b, Tensor):
        b = a._number(b)
    kind = meet(a, b)  # type: ignore[arg-type]
    return apply("select", (condition, a.to(kind), b.to(kind)))  # type: ignore[union-attr]


_pending: list[int | Sequence[int]] = []
"""The seed set since the last draw; the generator is seeded only when needed, because seeding is slow."""


class _SameRows:
    """Draws the same numbers for every row of dimension 0, independent of earlier draws."""

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """Return uniform numbers of shape `size`, or of `out`, as NumPy's generator does."""
        shape = size if out is None else out.shape
        return _repeated(np.random.default_rng(0).random((1, *shape[1:]), dtype), shape, out)

    def standard_normal(self, size: Any, dtype: Any = np.float64) -> Any:
        """Return normal numbers of shape `size`, as NumPy's generator does."""
        return _repeated(np.random.default_rng(0).standard_normal((1, *size[1:]), dtype), size, None)

    def __getattr__(self, name: str) -> Any:
        """Return any other method of a fresh NumPy generator."""
        return getattr(np.random.default_rng(0), name)


def _repeated(row: np.ndarray[Any, Any], shape: Any, out: Any) -> Any:
    """An array of `shape`, every row of which is `row`."""
    target = np.empty(shape, row.dtype) if out is None else out
    target[...] = row if shape else row[0]
    return target


_same_rows = _SameRows()
_is_same: list[bool] = []


@contextmanager
def same_draws() -> Iterator[None]:
    """Give every sample the same random numbers, so that parts of a batch match the complete batch."""
    _is_same.append(True)
    try:
        yield
    finally:
        _is_same.pop()


def generator() -> Any:
    """Return the source of all random numbers of this library: NumPy's generator, or its replacement."""
    if _is_same:
        return _same_rows
    if _pending:
        _generator().bit_generator.state = np.random.PCG64(_pending.pop()).state
    return _generator()


def manual_seed(seed: int | Sequence[int]) -> None:
    """Start the sequence of random numbers of `seed`, which is the same on every machine and back end."""
    _pending[:] = [seed]


@cache  # created on first use, because importing numpy.random takes as long as importing this library
def _generator() -> np.random.Generator:
    return np.random.default_rng()


def get_rng_state() -> dict[str, Any]:
    """The random state, a JSON-able dictionary for `set_rng_state`."""
    return dict(generator().bit_generator.state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state from `get_rng_state`."""
    generator().bit_generator.state = state


def rand(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """Numbers in [0, 1), uniform."""
    return tensor(generator().random(flat_sizes(size), check_type(dtype).type), requires_grad=requires_grad)


def randn(*size: int | Sequence[int], dtype: Any = DEFAULT_FLOAT, requires_grad: bool = False) -> Tensor:
    """Numbers of mean 0 and standard deviation 1, normal."""
    return tensor(generator().standard_normal(flat_sizes(size), check_type(dtype).type), requires_grad=requires_grad)


def randint(low: int, high: int, size: Sequence[int]) -> Tensor:
    """Integers from `low` to below `high`."""
    return tensor(generator().integers(low, high, tuple(size)))


def randperm(n: int) -> Tensor:
    """The integers below n in random order."""
    return tensor(generator().permutation(n))


def save_file(state: Mapping[str, Any], path: Path | str) -> None:
    """Write a state (`model.state_dict()`, or arrays by name) to a safetensors file."""
    from safetensors.numpy import save_file as write  # takes 50 ms, so it is imported only for saving

    write({name: _contiguous(value) for name, value in state.items()}, str(path))


def load_file(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, for `model.load_state_dict`."""
    from safetensors.numpy import load_file as read

    return {name: tensor(array) for name, array in read(str(path)).items()}


def _contiguous(value: Any) -> np.ndarray[Any, Any]:
    return np.array(value.detach().numpy() if isinstance(value, Tensor) else value, order="C")
