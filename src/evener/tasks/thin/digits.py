"""Thin task `digits`: the residual network of the task of that name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.autodiff import Tensor, nn, optim
from evener.autodiff import functional as F
from evener.data.digits import load_digits, split_digits
from evener.errors import require
from evener.task import ThinTask
from evener.tasks.schedule import share_of_peak

INK, MEAN, STD = 16, 0.305, 0.376


def thin_task(data_dir: Path | None = None, channels: int = 64, blocks: int = 5) -> ThinTask:
    """See the task `digits`.

    Raises:
        InvalidValue: `channels` or `blocks` is not positive, or a folder is given.
    """
    require(data_dir is None, "the data folder of task digits", str(data_dir), "left out: its data are part of Evener")
    require(channels > 0, "channels", channels, "positive")
    require(blocks > 0, "blocks", blocks, "positive")
    return ThinTask(
        name="digits",
        model=partial(digits_model, channels, blocks),
        loss=F.cross_entropy,
        train_data=partial(_data, part=0),
        validation_data=partial(_data, part=1),
        optimizer=partial(optim.AdamW, lr=3e-3, weight_decay=1e-3),
        rate=share_of_peak,
        batch_size=224,
        epochs=8,
    )


def digits_model(channels: int, blocks: int) -> nn.Module:
    """A residual network, [N, 1, 8, 8] -> [N, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        *(ThinResidualBlock(channels) for _ in range(blocks)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * channels, 10),
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


def _data(part: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training (0) or validation samples (1): images with mean 0 and deviation 1, and labels."""
    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    inputs = (images[chosen][:, np.newaxis].astype(np.float32) / INK - MEAN) / STD
    return inputs.astype(np.float32), labels[chosen].astype(np.int64)
