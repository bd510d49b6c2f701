"""The task of ps_hosts.py: the network of task `mnist`, looked at every hundred steps instead of every 469."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset

from evener import Task
from evener.data.mnist import read_mnist
from evener.data.tasks.mnist import mnist_model

TRAIN, VALIDATION = 12_800, 2_000
"""Of the 60 000 and the 10 000 images: validation comes after every pass over the training images."""


def task(data_dir: Path, lr: float = 0.02, momentum: float = 0.9) -> Task:
    return Task(
        name="mnist, 12 800 images",
        model=mnist_model,
        loss=cross_entropy,
        train_data=partial(read, data_dir, "train", TRAIN),
        validation_data=partial(read, data_dir, "test", VALIDATION),
        optimizer=partial(SGD, lr=lr, momentum=momentum),
        batch_size=128,
        epochs=12,
    )


def read(folder: Path, split: Literal["train", "test"], count: int) -> TensorDataset:
    images, labels = (torch.from_numpy(array[:count]) for array in read_mnist(folder, split))
    return TensorDataset(images.unsqueeze(1), labels.long())
