"""Comparison of training steps, as arrays: one process against nodes that divide every batch.

A weight whose gradient is only rounding is left out, since some optimisers turn rounding into a whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

_ROUNDING = 1e3 * 2.0**-52
"""Relative to the largest value: a smaller difference in float64 may be rounding."""
_MIN_GRADIENT = 1e-3
"""Relative to the largest gradient: a smaller gradient is judged as if it had this size."""
_CLIPPED = 1e-2
_NOISE = 10.0
"""A gradient below so many times its own error, at the tolerance, is noise."""


def felt(clip_norm: float | None) -> float | None:
    """Return a bound on gradient norms for a check: so small that it clips every gradient."""
    return None if clip_norm is None else min(clip_norm, _CLIPPED)


class StepArrays(NamedTuple):
    """The values that one training step computes.

    Attributes:
        loss: mean over the samples.
        gradients: by parameter.
        state: parameters, statistics and counters after the step.
    """

    loss: float
    gradients: Arrays
    state: Arrays


class ArrayDifference(NamedTuple):
    """How far two values are apart.

    Attributes:
        what: is compared, in words.
        off: the largest difference, relative to the size of the value.
        is_loss: whether a loss is compared.
    """

    what: str
    off: float
    is_loss: bool = False


def differences(
    divided: Sequence[StepArrays], whole: Sequence[StepArrays], initial: Arrays, tolerance: float
) -> Iterator[ArrayDifference]:
    """Compare float64 steps value by value, in the order in which they were computed.

    Args:
        divided: the steps of the nodes.
        whole: the same steps of one process.
        initial: the state before the first step.
        tolerance: a relative difference that rounding explains.
    """
    noise: dict[str, NDArray[np.bool_]] = {}
    for number, (step, right) in enumerate(zip(divided, whole, strict=True), 1):
        yield loss_difference(step, right, number)
        largest_gradient = max(map(_largest, right.gradients.values()), default=0.0)
        for name, expected in reversed(list(right.gradients.items())):
            value = step.gradients[name]
            scale = max(_largest(expected), _MIN_GRADIENT * largest_gradient)
            yield ArrayDifference(f"the gradient of {name} in step {number}", _off(value, expected, scale))
            is_noise = np.abs(expected) < _NOISE * _largest(value - expected) / tolerance
            noise[name] = noise.get(name, np.zeros_like(is_noise)) | is_noise
        for name, expected in right.state.items():
            value = step.state[name]
            if name in noise:
                value = np.where(noise[name], expected, value)
            rounding = _ROUNDING * max(_largest(expected), _largest(initial[name]))
            scale = _largest(expected - initial[name]) + rounding
            yield ArrayDifference(f"{name} after step {number}", _off(value, expected, scale))


def loss_difference(step: StepArrays, expected: StepArrays, number: int) -> ArrayDifference:
    """Compare the losses of step `number`."""
    off = abs(step.loss - expected.loss) / max(abs(expected.loss), 1e-6)
    return ArrayDifference(f"the loss of step {number}", off, is_loss=True)


def gradient_difference(step: StepArrays, expected: StepArrays) -> ArrayDifference:
    """Compare all gradients together: in single precision those of one parameter may be rounding alone."""
    pairs = [(step.gradients[name], right) for name, right in expected.gradients.items()]
    off = sum(float(np.square(value - right).sum()) for value, right in pairs)
    size = sum(float(np.square(right).sum()) for _, right in pairs)
    return ArrayDifference("the gradient of step 1", (off / max(size, 1e-30)) ** 0.5)


def _largest(array: NDArray[Any]) -> float:
    return float(np.abs(array).max(initial=0.0))


def _off(value: NDArray[Any], expected: NDArray[Any], scale: float) -> float:
    """Return the largest difference relative to `scale`; non-finite values must be the same in both."""
    if np.array_equal(value, expected, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(value - expected)
    same = (value == expected) | (np.isnan(value) & np.isnan(expected))
    return float(np.where(same, 0.0, apart).max(initial=0.0)) / max(scale, 1e-30)
