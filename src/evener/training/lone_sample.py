"""Refusal of batches of one sample before the first step: BatchNorm has no statistics of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.data.loader import random_state_kept
from evener.parallel.gradient_hooks import copied
from evener.records.errors import InvalidInput, text_of
from evener.records.single_sample_error import better_size, is_of_lone_sample


def refuse_lone_sample(
    model: nn.Module, forward: Callable[[nn.Module], object], *, samples: int, batch_size: int, parts: int = 1
) -> None:
    """Raise InvalidInput if a batch of the run has one sample, and the model's BatchNorm cannot take it.

    Args:
        model: to be trained; it stays as it is.
        forward: computes one sample of the training data with a copy of the model.
        samples: of an epoch.
        batch_size: of a step; the last batch of an epoch has the remaining samples.
        parts: micro-batches of a step.
    """
    sizes = {size for size in (min(batch_size, samples), samples % batch_size) if size}
    lone = [size for size in sorted(sizes) if size <= parts or size // parts == 1]
    if not lone or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    trial = copied(model)
    trial.train()
    try:
        with random_state_kept(), torch.no_grad():
            forward(trial)
    except ValueError as error:
        if not is_of_lone_sample(text_of(error)):
            raise
        which = "the last batch of every epoch" if lone[0] == samples % batch_size else "a batch"
        micro_batches = f" in {parts} micro-batches" if parts > 1 else ""
        raise InvalidInput(
            f"{which} has {lone[0]} of the {samples} samples{micro_batches}, and BatchNorm cannot take statistics of "
            f"one sample: take another --batch-size than {batch_size}{better_size(samples, batch_size, parts)}"
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
