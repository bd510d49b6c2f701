"""A task small enough for tests: a net with BatchNorm on made-up data that can be learnt."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task


def data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (count,), generator=draw)
    images = torch.randn(count, 1, 6, 6, generator=draw) + targets.view(-1, 1, 1, 1)
    return TensorDataset(images, targets)


def model(dropout: float = 0.0, norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4) if norm else nn.Tanh(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8) if norm else nn.Tanh(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(8, 3),
    )


class Counted(torch.optim.SGD):
    """Counts its steps in an attribute, and makes smaller ones."""

    num_steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.1 / self.num_steps
        super().step()


def task(
    samples: int = 50,
    lr: float = 0.1,
    explode_at: int = 0,
    schedule: bool = False,
    dropout: float = 0.0,
    pause: float = 0.0,
    norm: bool = True,
    counted: bool = False,
) -> Task:
    """A task, with BatchNorm or without, whose loss takes `pause` seconds, and NaN in call `explode_at` (0: never)."""
    calls = [0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        calls[0] += outputs.requires_grad
        value = nn.functional.cross_entropy(outputs, targets)
        return value * float("nan") if explode_at and calls[0] >= explode_at else value

    return Task(
        name="tiny",
        model=lambda: model(dropout, norm),
        loss=loss,
        train_data=lambda: data(samples, 1),
        validation_data=lambda: data(23, 2),
        optimizer=lambda parameters: (Counted if counted else torch.optim.SGD)(parameters, lr=lr, momentum=0.9),
        scheduler=(lambda o, steps: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps)) if schedule else None,
        batch_size=10,
        epochs=2,
    )
