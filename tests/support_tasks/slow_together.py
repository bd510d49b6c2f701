"""A task whose steps on two nodes take longer than when timed by sizes: on node-1, or on rank 1 of torchrun."""

import multiprocessing
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task

BATCH_SIZE = 50
_TIMED = (2, 4, 8, 16, 32, BATCH_SIZE)


class Sleeper(nn.Module):
    """Two milliseconds a sample; `slow` seconds on the second node for a number of samples that is never timed."""

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.slow = slow
        self.layer = nn.Linear(4, 1)
        self.is_second = multiprocessing.current_process().name == "node-1" or os.environ.get("RANK") == "1"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs)
        is_slow = self.is_second and count > 16 and count not in _TIMED
        time.sleep(self.slow if is_slow else 0.002 * count)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def task(slow: float = 3.0) -> Task:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(3 * BATCH_SIZE, 4, generator=draw)
    return Task(
        name="slow together",
        model=lambda: Sleeper(slow),
        loss=nn.functional.mse_loss,
        train_data=lambda: TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=BATCH_SIZE,
        epochs=1,
    )
