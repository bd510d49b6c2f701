"""The networks that all contestants train, and MNIST's images: each epoch takes the next 3087 of them."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from course import BATCH, LEARNING_RATE, MOMENTUM, STEPS
from torch import Tensor, nn
from torch.utils.data import Dataset

TESTED = 1000
"""Images of a validation."""


def make_model() -> nn.Module:
    """Return the network that `RACE_NETWORK` names.

    cnn: 89 thousand weights, for a step of 1.6 ms a sample on one core.
    mlp: 669 thousand weights, for a step of 0.04 ms a sample; gradients are large in comparison.
    """
    torch.manual_seed(0)
    if os.environ.get("RACE_NETWORK") == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96 * 7 * 7, 10),
    )  # fmt: skip


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def read(folder: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 1, 28, 28) in [0, 1] and their classes."""
    stem = "train" if split == "train" else "t10k"
    with gzip.open(folder / f"{stem}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + count * 784), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / f"{stem}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + count), np.uint8, offset=8)
    return torch.from_numpy(images / np.float32(255)), torch.from_numpy(labels.astype(np.int64))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The images of the epoch that `set_epoch` chose: epoch 0 has the first `BATCH * STEPS`, and so on, in a circle."""

    def __init__(self, folder: Path) -> None:
        self.images, self.labels = read(folder, "train", 60_000)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the window."""
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = (self.epoch * len(self) + index) % len(self.images)
        return self.images[place], self.labels[place]

    def batch(self, step: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return samples `begin` to `end` of the batch of a step, from 0, of the whole run."""
        places = torch.arange(step * BATCH + begin, step * BATCH + end) % len(self.images)
        return self.images[places], self.labels[places]


class Referee:
    """Says how good a model is."""

    def __init__(self, folder: Path) -> None:
        self.images, self.labels = read(folder, "test", TESTED)
        print("training begins", flush=True)

    def judge(self, model: nn.Module, step: int) -> None:
        """Print the accuracy of `model` after `step`."""
        with torch.inference_mode():
            right = int((model(self.images).argmax(1) == self.labels).sum())
        print(f"step {step}: accuracy {right / len(self.labels):.2%}", flush=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Make one step on these samples."""
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
    optimizer.step()
