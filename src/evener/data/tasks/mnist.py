"""Task `mnist`: 28x28 digits from the four IDX files, kept as bytes until the model takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from evener.data.tasks import thin
from evener.data.tasks.parts import Normalise, convolution, one_cycle, twin
from evener.records.task import Task


def task(data_dir: Path | None = None) -> Task:
    """Recognises MNIST's digits; about 99 % right after the 3 epochs.

    Args:
        data_dir: folder of the four files; data/mnist by default.

    Raises:
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: (when the data are first used) a file is damaged.
    """
    return twin(
        thin.mnist(data_dir),
        model=mnist_model,
        loss=cross_entropy,
        optimizer=partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=one_cycle,
    )


def mnist_model() -> nn.Module:
    """Two convolutions and two linear layers, bytes [N, 1, 28, 28] -> [N, 10]."""
    return nn.Sequential(
        Normalise(mean=33.32, std=78.57),
        *(*convolution(1, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(*convolution(32, 64), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, thin.CLASSES)),
    )
