"""Training by one process, with nothing of ours but the order of the samples: what all else is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evener.data.sampler import permutation
from support.numpy_engine import MOMENTUM, Problem, gradient

MakeOptimiser = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def train(problem: Problem, batch: int, num_epochs: int, optimiser: MakeOptimiser) -> dict[str, NDArray[Any]]:
    """The state after `num_epochs` of PyTorch's optimiser on batches of the common order."""
    state = {name: view.copy() for name, view in problem.start.views().items()}
    parameters = {
        name: torch.from_numpy(a) for name, a in state.items() if name.startswith(("hidden.w", "hidden.b", "out"))
    }
    steps = optimiser(list(parameters.values()))
    for epoch in range(num_epochs):
        order = permutation(problem.num_samples, problem.seed, epoch)
        for first in range(0, len(order), batch):
            samples = order[first : first + batch]
            _, grads, mean = gradient(state, problem.inputs[samples], problem.labels[samples])
            for name, tensor in parameters.items():
                tensor.grad = torch.from_numpy(grads[name])
            steps.step()
            state["hidden.running_mean"] += MOMENTUM * (mean - state["hidden.running_mean"])
            state["num_batches_tracked"] += 1
    return state


def difference(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]], leave_out: str = "num_batches_tracked") -> float:
    """Largest of all arrays, relative to the largest value, at least 1."""
    return max(
        float(np.abs(a[name] - b[name]).max() / max(1.0, np.abs(b[name]).max())) for name in b if name != leave_out
    )
