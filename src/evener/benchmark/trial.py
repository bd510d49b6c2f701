"""A copy of a task's model on which anything may be tried; the model and the random numbers stay as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
LossStep = Callable[[nn.Module, Any], Tensor]
Fetch = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What training steps are tried with.

    Attributes:
        model: a copy, in training mode.
        optimizer: of the copy's parameters.
        loss_step: (model, batch) -> scalar loss.
        fetch: number of samples -> a batch of so many, on the device.
        device: that computes.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_step: LossStep
    fetch: Fetch
    device: torch.device

    def run_step(self, samples: int) -> None:
        """One whole step on a fresh batch of `samples`; gradients are kept."""
        self.clear_gradients()
        self.loss_step(self.model, self.fetch(samples)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)


@contextmanager
def trial_of(
    model: nn.Module, make_optimizer: MakeOptimizer, loss_step: LossStep, fetch: Fetch, device: torch.device
) -> Iterator[Trial]:
    """A trial with a copy of `model`; afterwards the model and all random number generators are as they were."""
    with random_numbers_kept(device):
        twin = copy.deepcopy(model).train()
        twin.zero_grad(set_to_none=True)
        optimizer = make_optimizer(twin.parameters())
        yield Trial(model=twin, optimizer=optimizer, loss_step=loss_step, fetch=fetch, device=device)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Afterwards Python, NumPy and PyTorch (CPU and `device`) draw the random numbers that they would have drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
