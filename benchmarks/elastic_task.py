"""A task for `elastic.py`: BatchNorm, a schedule and momentum, so that whatever is lost or done twice shows."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Task


def data(samples: int, seed: int) -> TensorDataset:
    """Made-up images of three classes that can be learnt."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (samples,), generator=draw)
    images = torch.randn(samples, 1, 6, 6, generator=draw) + targets.view(-1, 1, 1, 1)
    return TensorDataset(images, targets)


def model(has_norm: bool = True) -> nn.Module:
    """Return a convolution and two linear layers, with two BatchNorms between them if `has_norm`."""
    norms = (nn.BatchNorm2d(4), nn.BatchNorm1d(8)) if has_norm else (nn.Identity(), nn.Identity())
    layers = nn.Conv2d(1, 4, 3), norms[0], nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 8), norms[1], nn.ReLU(), nn.Linear(8, 3))


def task(samples: int = 400, pause: float = 0.0, norm: bool = True) -> Task:
    """The task; a rank's part of a step takes `pause` seconds longer."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(pause)
        return nn.functional.cross_entropy(outputs, targets)

    return Task(
        name="elastic",
        model=lambda: model(norm),
        loss=loss,
        train_data=lambda: data(samples, 1),
        validation_data=lambda: data(23, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        batch_size=20,
    )
