"""A task that takes time without computing: faults can be made for minutes while the machine's cores are at rest.

Its option `width` says how large the model is: 11 numbers for each.
"""

from __future__ import annotations

from pathlib import Path

SAMPLES, BATCH, UPDATES_AN_EPOCH = 240, 24, 10

_DATA = """
import numpy as np

def blobs(count, seed):
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, count)
    centres = np.random.default_rng(0).standard_normal((4, 6))
    return (centres[labels] + 0.9 * draw.standard_normal((count, 6))).astype(np.float32), labels.astype(np.int64)
"""

_THIN = """
import time
from blobs import blobs
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.records.task import ThinTask

def thin_task(pause: float = 0.0, width: int = 8, epochs: int = 20) -> ThinTask:
    def loss(outputs, targets):
        time.sleep(pause)
        return F.cross_entropy(outputs, targets)

    return ThinTask(
        name="pausing",
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)),
        loss=loss,
        train_data=lambda: blobs(240, 1),
        validation_data=lambda: blobs(48, 2),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.05),
        batch_size=24,
        epochs=epochs,
    )
"""

_TASK = """
import torch
from blobs import blobs
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def task(pause: float = 0.0, width: int = 8, epochs: int = 20) -> Task:
    read = lambda *words: TensorDataset(*map(torch.from_numpy, blobs(*words)))
    return Task(
        name="pausing",
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: read(240, 1),
        validation_data=lambda: read(48, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=24,
        epochs=epochs,
    )
"""

IDLE = """
import os
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def loss(outputs, targets):
    time.sleep(len(outputs) * float(os.environ.get("PAUSE", "0.005")))
    return nn.functional.mse_loss(outputs, targets)

def task():
    return Task(
        name="idle",
        model=lambda: nn.Linear(4, 1),
        loss=loss,
        train_data=lambda: TensorDataset(torch.zeros(80, 4), torch.zeros(80, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=8,
        epochs=4000,
    )
"""
"""A task whose samples take longer on nodes with $PAUSE."""


def write_pausing_task(folder: Path) -> str:
    """The path of the task's file, once it and what belongs to it lie in `folder`."""
    for name, text in (("blobs.py", _DATA), ("pausing_thin.py", _THIN), ("pausing.py", _TASK)):
        (folder / name).write_text(text)
    return str(folder / "pausing.py")
