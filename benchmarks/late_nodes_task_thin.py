"""The task of late_nodes.py: a small classifier whose steps sleep, so that ten nodes fit on two cores."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.records.task import ThinTask


def arrays(count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Points on two sides of a curved surface."""
    points = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return points, ((points[:, :4] ** 2).sum(1) > (points[:, 4:] ** 2).sum(1)).astype(np.int64)


def thin_task(samples: int = 4000, pause: float = 0.15) -> ThinTask:
    """Return the task; a step of training takes `pause` seconds longer."""

    def loss(outputs: Any, targets: Any) -> Any:
        if len(targets) < 100:  # it is no validation
            time.sleep(pause)
        return F.cross_entropy(outputs, targets)

    return ThinTask(
        name="late nodes",
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
        loss=loss,
        train_data=lambda: arrays(samples, 0),
        validation_data=lambda: arrays(1000, 1),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=8,
        epochs=4,
    )
