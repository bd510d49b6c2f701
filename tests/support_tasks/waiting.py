"""A task whose loss notes how often its thread has waited for a device: a line for every micro-batch of a rank."""

import os
import threading

import torch
from tiny import data, model
from torch import nn

from evener import Task
from support import standin

BATCH, STEPS = 10, 30


def note_waits(device: torch.device) -> None:
    """Write a line, if a device of the stand-in computes the loss of a training step."""
    if torch.is_grad_enabled() and device.type == standin.NAME:
        with open(os.environ["EVENER_TEST_WAITS"], "a") as file:
            file.write(f"{os.getpid()}-{threading.get_ident()} {standin.load().waits_of_thread()}\n")


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    note_waits(outputs.device)
    return nn.functional.cross_entropy(outputs, targets)


class PartlyUsed(nn.Module):
    """A network beside `count` weights that it does not use."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.network = model(norm=False)
        self.unused = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.network(x)
        return outputs


def task(norm: bool = True, unused: int = 0, clip: bool = False) -> Task:
    """A task, with BatchNorm or without, or without it and with `unused` weights, and perhaps short gradients."""
    return Task(
        name="waiting",
        model=lambda: PartlyUsed(unused) if unused else model(norm=norm),
        loss=loss,
        train_data=lambda: data(BATCH * STEPS, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=BATCH,
        epochs=1,
        clip_norm=0.1 if clip else None,
    )
