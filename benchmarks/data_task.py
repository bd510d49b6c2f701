"""A task for `data.py`: images in files of their own, which are read when a batch needs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from evener import Task

SHAPE = (3, 182, 182)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of a folder, each with its number modulo 10 as its class."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.load(self.files[index])).float() / 255, index % 10


def write(folder: Path, count: int) -> int:
    """Write so many images of random pixels; return their bytes."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        np.save(folder / f"{number:06}.npy", random.integers(0, 256, SHAPE, dtype=np.uint8))
    return sum(file.stat().st_size for file in folder.iterdir())


def task(data_dir: Path) -> Task:
    """The task; its model is small, since the benchmark is about the data."""
    return Task(
        name="images",
        model=lambda: nn.Sequential(nn.AvgPool2d(26), nn.Flatten(), nn.Linear(3 * 7 * 7, 10)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: Images(data_dir),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=64,
    )
