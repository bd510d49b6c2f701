"""The loss is a sum: a micro-batch's mean counts as much as its part of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.errors import InvalidValue
from evener.parallel.pipeline.batches import divided, samples_in
from evener.tracer.nested import map_tensors, tensors_in

Loss = Callable[[Any, Any], Tensor]
"""Mean loss over samples, from what the model returned for them and their targets."""
Weigh = Callable[[Any], float]
"""What a loss is a mean over, counted in the targets."""


def weighted(
    loss: Loss, weigh: Weigh, targets: Any, sizes: Sequence[int], total: float | None, device: torch.device
) -> Callable[[Any, int], Tensor]:
    """The loss of (what the model returned, micro-batch), so that the sum over micro-batches is that of the batch.

    Args:
        loss: mean over what `weigh` counts.
        weigh: of a micro-batch's targets.
        targets: of the batch.
        sizes: samples of every micro-batch.
        total: what `weigh` counts in the whole batch, over all replicas; by default in `targets`.
        device: of the last stage.

    Raises:
        InvalidValue: targets are missing, or not as many as inputs.
    """
    if targets is None or samples_in(targets) != sum(sizes):
        got = "none" if targets is None else f"{samples_in(targets)} samples"
        raise InvalidValue("targets", got, f"given where the last stage is, for the {sum(sizes)} samples of the inputs")
    parts = [map_tensors(part, lambda tensor: tensor.to(device)) for part in divided(targets, sizes)]
    weights = [weigh(part) for part in parts]
    whole = sum(weights) if total is None else total
    return lambda outputs, i: loss(outputs, parts[i]) * (weights[i] / whole)


def measured_loss(loss: Loss, targets: Any, outputs: Any) -> Tensor:
    """The loss of one micro-batch, computed where its outputs are."""
    device = next(tensors_in(outputs)).device
    return loss(outputs, map_tensors(targets, lambda tensor: tensor.to(device)))
