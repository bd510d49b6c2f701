"""Task `digits`: 1797 real 8x8 digits that come with Evener, and a network that computes much and sends little."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from evener.data.digits import load_digits, split_digits
from evener.errors import require
from evener.task import Task
from evener.tasks.residual import ResidualBlock, convolution
from evener.tasks.schedule import one_cycle

INK, MEAN, STD = 16, 0.305, 0.376


def task(data_dir: Path | None = None, channels: int = 64, blocks: int = 5) -> Task:
    """Recognises the digits; more than 97 % right after the 8 epochs.

    Args:
        data_dir: None, for the data set is part of Evener.
        channels: of every convolution.
        blocks: residual blocks, of two convolutions each.

    Raises:
        InvalidValue: `channels` or `blocks` is not positive, or a folder is given.
    """
    require(data_dir is None, "the data folder of task digits", str(data_dir), "left out: its data are part of Evener")
    require(channels > 0, "channels", channels, "positive")
    require(blocks > 0, "blocks", blocks, "positive")
    return Task(
        name="digits",
        model=partial(digits_model, channels, blocks),
        loss=cross_entropy,
        train_data=partial(_data, part=0),
        validation_data=partial(_data, part=1),
        optimizer=partial(AdamW, lr=3e-3, weight_decay=1e-3),
        scheduler=one_cycle,
        batch_size=224,
        epochs=8,
    )


def digits_model(channels: int, blocks: int) -> nn.Module:
    """A residual network, [N, 1, 8, 8] -> [N, 10]: 18 `channels`^2 `blocks` weights, each used 64 times a sample.

    Without BatchNorm, whose statistics the nodes would have to exchange in every layer of every step: so the nodes meet
    once a step, and what is seen is how the work is divided.
    """
    return nn.Sequential(
        *convolution(1, channels, batch_norm=False),
        nn.ReLU(),
        *(ResidualBlock(channels, batch_norm=False) for _ in range(blocks)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * channels, 10),
    )


def _data(part: int) -> TensorDataset:
    """Training (0) or validation samples (1): images with mean 0 and deviation 1, and labels."""
    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    inputs = (torch.from_numpy(images[chosen]).unsqueeze(1) / INK - MEAN) / STD
    return TensorDataset(inputs, torch.from_numpy(labels[chosen]).long())
