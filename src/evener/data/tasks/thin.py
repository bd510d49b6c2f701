"""The built-in tasks that need no PyTorch: models of `evener.autodiff`, and data as arrays, which their twins share."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evener.autodiff import Tensor, nn, optim
from evener.autodiff import functional as F
from evener.data.mnist import MNIST_FOLDER, read_mnist
from evener.records.errors import require
from evener.records.task import ThinTask

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Inputs and targets, one sample after the other in both."""

INK, MEAN, STD = 16, 0.305, 0.376
"""Of the digits: the darkest value, and what mean and deviation are when that counts as 1."""
PIXELS, HIDDEN, CLASSES = 784, 32, 10
WHITE = 255
NFNN_SHARE, NFNN_RATE, NFNN_BATCH = 0.8, 0.01, 32
"""Of the images that are trained on, learning rate and batch of NfNN's experiment."""
RISE = 0.2


def share_of_peak(step: int, steps: int) -> float:
    """Learning rate in `step`, from 0, of `steps`, as a share of the largest.

    It rises in a line over the first fifth, then falls along half a cosine to nothing. Steps after the last keep the
    last rate, so that a run may repeat some after the loss of a node.
    """
    passed = min(step + 1, steps) / (steps + 1)
    if passed < RISE:
        return passed / RISE
    return (1 + math.cos(math.pi * (passed - RISE) / (1 - RISE))) / 2


def digits(data_dir: Path | None = None, channels: int = 64, blocks: int = 5) -> ThinTask:
    """See the task `digits`.

    Raises:
        InvalidValue: `channels` or `blocks` is not positive, or a folder is given.
    """
    require(data_dir is None, "the data folder of task digits", str(data_dir), "left out: its data are part of Evener")
    require(channels > 0, "channels", channels, "positive")
    require(blocks > 0, "blocks", blocks, "positive")
    return ThinTask(
        name="digits",
        model=partial(_digits_model, channels, blocks),
        loss=F.cross_entropy,
        train_data=partial(_read_digits, part=0),
        validation_data=partial(_read_digits, part=1),
        optimizer=partial(optim.AdamW, lr=3e-3, weight_decay=1e-3),
        rate=share_of_peak,
        batch_size=224,
        epochs=8,
    )


def _digits_model(channels: int, blocks: int) -> nn.Module:
    """A residual network, [N, 1, 8, 8] -> [N, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        *(ThinResidualBlock(channels) for _ in range(blocks)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * channels, CLASSES),
    )


class ThinResidualBlock(nn.Module):
    """x -> relu(x + two convolutions of x), [N, C, H, W] -> [N, C, H, W]; it starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.constant_(second.weight, 0.0)
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), second)

    def forward(self, inputs: Tensor) -> Tensor:
        """The block's output, of the shape of `inputs`."""
        outputs: Tensor = (inputs + self.body(inputs)).relu()
        return outputs


def _read_digits(part: int) -> Arrays:
    """Training (0) or validation samples (1): images with mean 0 and deviation 1, and labels."""
    from evener.data.digits import load_digits, split_digits  # half a megabyte that other tasks' nodes do without

    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    inputs = (images[chosen][:, np.newaxis].astype(np.float32) / INK - MEAN) / STD
    return inputs.astype(np.float32), labels[chosen].astype(np.int64)


def mnist(data_dir: Path | None = None) -> ThinTask:
    """See the task `mnist`; data/mnist is the folder by default."""
    folder = data_dir or MNIST_FOLDER
    return ThinTask(
        name="mnist",
        model=_mnist_model,
        loss=F.cross_entropy,
        train_data=partial(_read_mnist, folder, "train"),
        validation_data=partial(_read_mnist, folder, "test"),
        optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        rate=share_of_peak,
        batch_size=128,
        epochs=3,
    )


def _mnist_model() -> nn.Module:
    """Two convolutions and two linear layers, bytes [N, 1, 28, 28] -> [N, 10]."""
    return nn.Sequential(
        ThinNormalise(mean=33.32, std=78.57),
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


class ThinNormalise(nn.Module):
    """(x - mean) / std in floating point: data may stay bytes, a quarter of float32's memory."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = float(np.float32(mean)), float(np.float32(std))  # as the PyTorch task's buffers hold them

    def forward(self, values: Tensor) -> Tensor:
        """Floating-point values of the shape of `values`."""
        return (values - self.mean) / self.std


def _read_mnist(folder: Path, split: Literal["train", "test"]) -> Arrays:
    images, labels = read_mnist(folder, split)
    return images[:, np.newaxis], labels.astype(np.int64)


def nfnn(data_dir: Path | None = None, lr: float = NFNN_RATE, hidden: int = HIDDEN) -> ThinTask:
    """See the task `nfnn`; the first four fifths of MNIST's training images are trained on: 48 000 and 12 000.

    Raises:
        InvalidValue: `lr` or `hidden` is not positive.
    """
    require(lr > 0, "lr", lr, "positive")
    require(hidden > 0, "hidden", hidden, "positive")
    folder = data_dir or MNIST_FOLDER
    return ThinTask(
        name="nfnn",
        model=partial(_nfnn_model, hidden),
        loss=F.nll_loss,
        train_data=partial(_read_nfnn, folder, 0),
        validation_data=partial(_read_nfnn, folder, 1),
        optimizer=partial(optim.SGD, lr=lr),
        batch_size=NFNN_BATCH,
        epochs=4,
    )


def _nfnn_model(hidden: int) -> nn.Module:
    """Bytes [N, 784] -> log-probabilities [N, 10]."""
    model = nn.Sequential(
        ThinNormalise(mean=0, std=WHITE),
        nn.Linear(PIXELS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
        nn.LogSoftmax(1),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return model


def _read_nfnn(folder: Path, part: int) -> Arrays:
    """Training (0) or validation samples (1): images as bytes [N, 784], and their labels [N]."""
    images, labels = read_mnist(folder, "train")
    cut = int(NFNN_SHARE * len(images))
    chosen = slice(cut) if part == 0 else slice(cut, None)
    return images[chosen].reshape(-1, PIXELS).copy(), labels[chosen].astype(np.int64)  # a view would keep all of them
