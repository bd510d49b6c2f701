"""A task whose step idles for as long as it would take a node of its speed, whatever it learns.

A node that sleeps needs no processor, so that many of them fit one machine, also beside strangers; what it overslept is
taken off its next step, and nothing else: what a step costs besides counts.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Task

SAMPLES, BATCH = 40, 8
SPEEDS = (1.0, 0.5, 0.25)
"""Of node-0, node-1 and node-2."""


class Sleeper:
    """Sleeps as long as it is told to, on average."""

    def __init__(self) -> None:
        self._overslept = 0.0

    def __call__(self, seconds: float) -> None:
        wanted = max(0.0, seconds - self._overslept)
        begun = time.perf_counter()
        time.sleep(wanted)
        self._overslept += time.perf_counter() - begun - seconds


def task(lr: float = 0.1, pause: float = 0.04, samples: int = SAMPLES) -> Task:
    sleep = Sleeper()
    name = multiprocessing.current_process().name
    speed = SPEEDS[int(name.removeprefix("node-"))] if name.startswith("node-") else SPEEDS[0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:  # in proportion, so that divided batches take their parts
            sleep(pause * len(outputs) / BATCH / speed)
        return nn.functional.mse_loss(outputs, targets)

    return Task(
        name="sleeping",
        model=lambda: nn.Linear(4, 1),
        loss=loss,
        train_data=lambda: data(samples, 0),
        validation_data=lambda: data(20, 1),
        correct=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch_size=BATCH,
    )


def data(count: int, seed: int) -> Any:
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points.sum(1, keepdim=True))
