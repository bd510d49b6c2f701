"""Thin task `mnist`: the network of the task of that name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evener.autodiff import Tensor, nn, optim
from evener.autodiff import functional as F
from evener.data.mnist import read_mnist
from evener.task import ThinTask
from evener.tasks.schedule import share_of_peak

FOLDER = Path("data/mnist")


def thin_task(data_dir: Path | None = None) -> ThinTask:
    """See the task `mnist`.

    Raises:
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: likewise, a file is damaged.
    """
    folder = data_dir or FOLDER
    return ThinTask(
        name="mnist",
        model=mnist_model,
        loss=F.cross_entropy,
        train_data=partial(_data, folder, "train"),
        validation_data=partial(_data, folder, "test"),
        optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        rate=share_of_peak,
        batch_size=128,
        epochs=3,
    )


def mnist_model() -> nn.Module:
    """Two convolutions and two linear layers, bytes [N, 1, 28, 28] -> [N, 10]."""
    return nn.Sequential(
        ThinNormalise(mean=33.32, std=78.57),
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class ThinNormalise(nn.Module):
    """(x - mean) / std in floating point: data may stay bytes, a quarter of float32's memory."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = float(np.float32(mean)), float(np.float32(std))  # as the PyTorch task's buffers hold them

    def forward(self, values: Tensor) -> Tensor:
        """Floating-point values of the shape of `values`."""
        return (values - self.mean) / self.std


def _data(folder: Path, split: Literal["train", "test"]) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = read_mnist(folder, split)
    return images[:, np.newaxis], labels.astype(np.int64)
