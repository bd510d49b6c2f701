"""The networks and data of the race as a task of Evener, which travels to the nodes alone and imports nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from evener import Task
from evener.data.mnist import read_mnist

TESTED = 1000


def task(data_dir: Path, samples: int = 3087, network: str = "cnn") -> Task:
    """Return the task; an epoch has so many `samples`."""
    return Task(
        name="race",
        model=make_mlp if network == "mlp" else make_cnn,
        loss=cross_entropy,
        train_data=partial(Windows, data_dir, samples),
        validation_data=partial(test_data, data_dir),
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        epochs=1000,
    )


def make_mlp() -> nn.Module:
    """Return a network of `workload.py`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def make_cnn() -> nn.Module:
    """Return a network of `workload.py`."""
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96 * 7 * 7, 10),
    )  # fmt: skip


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Epoch 0 has the first `samples` images, and so on, in a circle."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.images, self.labels = read(folder, "train")
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the window."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = (self.epoch * self.samples + index) % len(self.images)
        return self.images[place], self.labels[place]


def test_data(folder: Path) -> TensorDataset:
    """Return the images of a validation."""
    images, labels = read(folder, "test")
    return TensorDataset(images[:TESTED], labels[:TESTED])


def read(folder: Path, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Return images (count, 1, 28, 28) in [0, 1] and their classes."""
    images, labels = map(torch.from_numpy, read_mnist(folder, split))
    return images.unsqueeze(1) / 255, labels.long()
