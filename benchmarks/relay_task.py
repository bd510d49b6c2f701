"""A task for `relay.py`: an MLP whose weights take a line longer than its step takes a processor."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task


def data(samples: int) -> TensorDataset:
    """Random inputs, and whether their sum is positive."""
    inputs = torch.randn(samples, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def task(samples: int = 6400, width: int = 512) -> Task:
    """The task; the weights have about `width` * (`width` + 24) numbers."""

    def model() -> nn.Module:
        layers = nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        return nn.Sequential(*layers)

    return Task(
        name="relay",
        model=model,
        loss=nn.functional.cross_entropy,
        train_data=lambda: data(samples),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=64,
    )
