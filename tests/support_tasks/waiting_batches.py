"""A BatchTask that notes how often its thread has waited for a device; its loss has a divisor of its own on request."""

from typing import Any

import torch
from tiny import data, model
from torch import nn
from waiting import BATCH, STEPS, note_waits

from evener import BatchTask


def mean(network: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    outputs = network(batch[0])
    note_waits(outputs.device)
    return nn.functional.cross_entropy(outputs, batch[1])


def ratio(network: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of cross entropies, and their number on the device."""
    outputs = network(batch[0])
    note_waits(outputs.device)
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), torch.ones_like(outputs[:, 0]).sum()


def task(divisor: bool = False) -> BatchTask:
    """A task, with the mean over samples or a divisor of its own."""
    return BatchTask(
        name="waiting_batches",
        model=model,
        loss=ratio if divisor else mean,
        train_data=lambda: data(BATCH * STEPS, 1),
        batch_size=BATCH,
        epochs=1,
    )
