"""A task to begin with: replace data, model and loss by your own, then `evener train THIS_FILE --local-nodes 1,0.5`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import Dataset, TensorDataset

from evener.records.task import Task


def task(width: int = 64, learning_rate: float = 3e-3) -> Task:
    """Return what is trained; the arguments are options: `--option width=128 --option learning_rate=0.01`."""
    return Task(
        name="my-task",
        model=lambda: model(width),
        train_data=lambda: points(2000, seed=0),
        validation_data=lambda: points(500, seed=1),
        loss=cross_entropy,
        optimizer=lambda parameters: AdamW(parameters, lr=learning_rate),
        batch_size=100,
        epochs=5,
    )


def model(width: int) -> nn.Module:
    """[N, 2] -> [N, 2]."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def points(count: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    """So many points of the plane, and whether each lies in the unit circle."""
    drawn = 2.5 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1.25
    return TensorDataset(drawn, (drawn.square().sum(dim=1) < 1).long())
