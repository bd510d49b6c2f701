"""The random state: one for the process, seeded by `manual_seed`, drawn from on the host whatever the back end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from evener.autodiff.tensors.base import DEFAULT_FLOAT, check_type
from evener.autodiff.tensors.creation import tensor
from evener.autodiff.tensors.shaping import flat_sizes
from evener.autodiff.tensors.tensor import Tensor

_pending: list[int | Sequence[int]] = []
"""The seed that was set since the last number was drawn: seeding takes longer than a small layer."""


def generator() -> np.random.Generator:
    """Where all random numbers of this library come from."""
    if _pending:
        _generator().bit_generator.state = np.random.PCG64(_pending.pop()).state
    return _generator()


def manual_seed(seed: int | Sequence[int]) -> None:
    """Begin the sequence of random numbers that belongs to `seed`, the same on every machine and back end."""
    _pending[:] = [seed]


@cache  # made when it is first needed, because importing numpy.random takes as long as importing this whole library
def _generator() -> np.random.Generator:
    return np.random.default_rng()


def get_rng_state() -> dict[str, Any]:
    """The random state, a JSON-able dictionary for `set_rng_state`."""
    return dict(generator().bit_generator.state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on with a state from `get_rng_state`."""
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
