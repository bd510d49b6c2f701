"""A task on machines that others use while it is timed by sizes, and that are idle afterwards."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task

BATCH_SIZE = 50
_TIMED = (2, 4, 8, 16, 32, BATCH_SIZE)


class Sleeper(nn.Module):
    """Two milliseconds a sample; four times as many for the numbers of samples that are timed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs)
        time.sleep((0.008 if count in _TIMED else 0.002) * count)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def task() -> Task:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(3 * BATCH_SIZE, 4, generator=draw)
    return Task(
        name="busy at first",
        model=Sleeper,
        loss=nn.functional.mse_loss,
        train_data=lambda: TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=BATCH_SIZE,
        epochs=1,
    )
