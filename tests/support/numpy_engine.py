"""A small classifier in NumPy with its gradient by hand, a running statistic and a counter: the tests' engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.agreements.layout import Flat, StateLayout, flat_of, layout_of
from evener.agreements.messages import Lease, positions
from evener.data.sampler import permutation

Array = NDArray[Any]
MOMENTUM = 0.1


class Problem:
    """Samples [N, 6] of 3 classes, and a first state of the model 6-5-3, or with more hidden units."""

    def __init__(self, num_samples: int = 96, dtype: str = "float64", seed: int = 3, hidden: int = 5) -> None:
        draw = np.random.default_rng(seed)
        self.seed = seed
        self.labels = draw.integers(0, 3, num_samples)
        centres = draw.standard_normal((3, 6))
        self.inputs = (centres[self.labels] + 0.7 * draw.standard_normal((num_samples, 6))).astype(dtype)
        state = {
            "hidden.weight": 0.5 * draw.standard_normal((6, hidden)).astype(dtype),
            "hidden.bias": np.zeros(hidden, dtype),
            "hidden.running_mean": np.zeros(hidden, dtype),
            "num_batches_tracked": np.array(0),
            "out.weight": 0.5 * draw.standard_normal((hidden, 3)).astype(dtype),
            "out.bias": np.zeros(3, dtype),
        }
        self.layout: StateLayout = layout_of(state, statistics=["hidden.running_mean"])
        self.start: Flat = flat_of(self.layout, state)

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def loss(self, state: Flat) -> float:
        """Mean over all samples."""
        return gradient(state.views(), self.inputs, self.labels)[0]


def gradient(state: dict[str, Array], x: Array, labels: Array) -> tuple[float, dict[str, Array], Array]:
    """Mean cross-entropy, its gradient by name, and the mean of the hidden activations."""
    n = len(labels)
    hidden = np.tanh(x @ state["hidden.weight"] + state["hidden.bias"])
    logits = hidden @ state["out.weight"] + state["out.bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    d_logits = np.exp(log_p)
    d_logits[np.arange(n), labels] -= 1
    d_logits /= n
    d_hidden = (d_logits @ state["out.weight"].T) * (1 - hidden**2)
    grads = {
        "hidden.weight": x.T @ d_hidden,
        "hidden.bias": d_hidden.sum(axis=0),
        "out.weight": hidden.T @ d_logits,
        "out.bias": d_logits.sum(axis=0),
    }
    return float(-log_p[np.arange(n), labels].mean()), grads, hidden.mean(axis=0)


class NumpyEngine:
    """An engine on `problem`; its local steps are plain SGD with learning rate `rate`."""

    unused: tuple[int, ...] = ()

    def __init__(self, problem: Problem, batch: int = 8, rate: float = 0.1) -> None:
        self.layout = problem.layout
        self._problem, self._batch, self._rate = problem, batch, rate
        self.state = problem.start.copy()
        self.used: list[tuple[int, int]] = []
        """(epoch, position) of every sample that was used, in order."""

    def load(self, weights: Flat) -> None:
        self.state.copy_from(weights)

    def gradient(self, lease: Lease, into: Flat) -> float:
        loss, grads = self._step(self._samples(lease))
        into.copy_from(self.state)
        into_views = into.views()
        for name, grad in grads.items():
            into_views[name][...] = grad
        return loss

    def local_steps(self, lease: Lease, into: Flat) -> float:
        samples, total = self._samples(lease), 0.0
        size = len(samples) if lease.num_steps == 1 else self._batch
        for first in range(0, len(samples), size):
            part = samples[first : first + size]
            loss, grads = self._step(part)
            total += loss * len(part)
            views = self.state.views()
            for name, grad in grads.items():
                views[name] -= self._rate * grad
        into.copy_from(self.state)
        return total / len(samples)

    def _samples(self, lease: Lease) -> Array:
        where = positions(lease.samples)
        self.used += [(lease.samples.epoch, int(p)) for p in where]
        return permutation(self._problem.num_samples, self._problem.seed, lease.samples.epoch)[where]

    def _step(self, samples: Array) -> tuple[float, dict[str, Array]]:
        views = self.state.views()
        loss, grads, mean = gradient(views, self._problem.inputs[samples], self._problem.labels[samples])
        views["hidden.running_mean"][...] = (1 - MOMENTUM) * views["hidden.running_mean"] + MOMENTUM * mean
        views["num_batches_tracked"] += 1
        return loss, grads
