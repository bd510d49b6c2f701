"""Noisy points in two classes, for both engines; `evener tune` varies its learning rate."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener import Task
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.records.task import ThinTask


def arrays(count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    points = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return points, ((points[:, :4] ** 2).sum(1) > (points[:, 4:] ** 2).sum(1)).astype(np.int64)


def thin_task(lr: float = 0.1, width: int = 16, pause: float = 0.0) -> ThinTask:
    if width == 13:
        raise ValueError("an unlucky width")

    def loss(outputs: Any, targets: Any) -> Any:
        time.sleep(pause)
        return F.cross_entropy(outputs, targets)

    return ThinTask(
        name="points",
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)),
        loss=loss,
        train_data=lambda: arrays(200, 0),
        validation_data=lambda: arrays(100, 1),
        optimizer=lambda parameters: optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=50,
        epochs=4,
    )


def task(lr: float = 0.1, width: int = 16, pause: float = 0.0) -> Task:
    import torch

    if width == 13:
        raise ValueError("an unlucky width")

    def loss(outputs: Any, targets: Any) -> Any:
        time.sleep(pause)
        return torch.nn.functional.cross_entropy(outputs, targets)

    def data(count: int, seed: int) -> Any:
        return torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays(count, seed)))

    return Task(
        name="points",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)),
        loss=loss,
        train_data=lambda: data(200, 0),
        validation_data=lambda: data(100, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=50,
        epochs=4,
    )


def space(trial: Any) -> dict[str, Any]:
    if os.environ.get("EVENER_TEST_SPACE") == "broken":
        raise KeyError("space")
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True)}
