"""Task `mnist`: 28x28 digits from the four IDX files, kept as bytes until the model takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset

from evener.data.mnist import read_mnist
from evener.task import Task
from evener.tasks.residual import convolution
from evener.tasks.schedule import one_cycle

FOLDER = Path("data/mnist")


def task(data_dir: Path | None = None) -> Task:
    """Recognises MNIST's digits; about 99 % right after the 3 epochs.

    Args:
        data_dir: folder of the four files; data/mnist by default.

    Raises:
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: likewise, a file is damaged.
    """
    folder = data_dir or FOLDER
    return Task(
        name="mnist",
        model=mnist_model,
        loss=cross_entropy,
        train_data=partial(_data, folder, "train"),
        validation_data=partial(_data, folder, "test"),
        optimizer=partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=one_cycle,
        batch_size=128,
        epochs=3,
    )


def mnist_model() -> nn.Module:
    """Two convolutions and two linear layers, bytes [N, 1, 28, 28] -> [N, 10]."""
    return nn.Sequential(
        Normalise(mean=33.32, std=78.57),
        *convolution(1, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Normalise(nn.Module):
    """(x - mean) / std, in the model's own floating-point type: data may stay bytes, a quarter of float32's memory.

    Args:
        mean: of the values that come in.
        std: their standard deviation.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.register_buffer(
            "mean", torch.tensor([float(mean)]), persistent=False
        )  # buffers follow .to() and .double()
        self.register_buffer("std", torch.tensor([float(std)]), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Floating-point values of the shape of `values`."""
        return (values - self.mean) / self.std


def _data(folder: Path, split: Literal["train", "test"]) -> TensorDataset:
    images, labels = read_mnist(folder, split)
    return TensorDataset(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long())
