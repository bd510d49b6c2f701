"""Checks gradients of backward against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evener.autodiff.errors import WrongGradient, require
from evener.autodiff.graph import no_grad
from evener.autodiff.tensors.creation import from_numpy, tensor
from evener.autodiff.tensors.tensor import Tensor


def gradcheck(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    eps: float = 1e-6,
    atol: float = 1e-6,
    rtol: float = 1e-6,
) -> None:
    """Compare backward's gradients of `function` with central differences, for a random combination of its outputs.

    Args:
        function: of the inputs, smooth near them; always the same result for the same inputs.
        inputs: float64 tensors that require a gradient, and others.
        eps: by how much an element is moved to either side.
        atol: how far the two may be apart, and
        rtol: how far besides, as a share of the difference quotient.

    Raises:
        WrongGradient: they are further apart; names input, element and both values.
        InvalidOperation: an input that requires a gradient is not float64.
    """
    checked = [i for i, one in enumerate(inputs) if one.requires_grad]
    for i in checked:
        require(inputs[i].dtype == np.float64, "gradcheck needs float64 inputs, input {} is {}", i, inputs[i].dtype)
    values = [one.detach().numpy().copy() for one in inputs]
    fresh = [tensor(value, requires_grad=i in checked) for i, value in enumerate(values)]
    output = function(*fresh)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, output.shape)
    output.backward(from_numpy(weights))
    for i in checked:
        grad = fresh[i].grad
        expected = _difference_quotients(function, values, i, weights, eps)
        _compare(i, np.zeros_like(expected) if grad is None else grad.numpy(), expected, atol, rtol)


def _difference_quotients(
    function: Callable[..., Tensor], values: list[np.ndarray], which: int, weights: np.ndarray, eps: float
) -> np.ndarray:
    """Return the central difference for every element of input `which`; f is the weighted sum of outputs."""
    moved = [value.copy() for value in values]
    quotients = np.empty_like(values[which])
    for place in np.ndindex(quotients.shape):
        ends = []
        for step in (eps, -eps):
            moved[which][place] = values[which][place] + step
            with no_grad():
                ends.append(float((function(*map(tensor, moved)).detach().numpy() * weights).sum()))
        moved[which][place] = values[which][place]
        quotients[place] = (ends[0] - ends[1]) / (2 * eps)
    return quotients


def _compare(which: int, actual: np.ndarray, expected: np.ndarray, atol: float, rtol: float) -> None:
    excess = np.abs(actual - expected) - (atol + rtol * np.abs(expected))
    if excess.size and not excess.max() <= 0:  # NaN is wrong too
        place = np.unravel_index(int(np.argmax(excess)), excess.shape)
        raise WrongGradient(
            f"the gradient of input {which} at {tuple(map(int, place))} is {actual[place]:.10g} by its rule and "
            f"{expected[place]:.10g} by central differences"
        )
