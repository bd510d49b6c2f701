"""The parameters and the state that this process's stages hold, as an optimiser and a checkpoint want them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from evener.errors import InvalidValue
from evener.parallel.pipeline.layout import Layout
from evener.parallel.pipeline.stage_modules import StageModules


def state_of(parts: Mapping[int, StageModules]) -> dict[str, Tensor]:
    """Everything that the stages hold, under the names that it has in the model."""
    return {name: tensor for part in parts.values() for name, tensor in part.root.state_dict().items()}


def load_state(parts: Mapping[int, StageModules], state: Mapping[str, Tensor]) -> None:
    """Take from `state` what the stages hold.

    Raises:
        InvalidValue: something is not in it.
    """
    for part in parts.values():
        own = part.root.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise InvalidValue("state", f"none of {missing[0]}", "of the whole model")
        part.root.load_state_dict({name: state[name] for name in own})


def clip(parts: Mapping[int, StageModules], layout: Layout, most: float, total: Callable[[float], float]) -> float:
    """Scale gradients so that the norm of all of them is `most` at most; returns what it was.

    Args:
        parts: of the stages of this process.
        layout: of its replica.
        most: the largest norm.
        total: sum over the processes of the replica.
    """
    square = 0.0
    for stage, part in parts.items():
        earlier = {name for names in layout.parameters[:stage] for name in names}  # tied weights count once
        own = [p.grad for name, p in part.parameters.items() if p.grad is not None and name not in earlier]
        square += float(torch.nn.utils.get_total_norm(own)) ** 2 if own else 0.0
    norm = math.sqrt(total(square))
    if norm > most:
        for part in parts.values():
            torch._foreach_mul_([p.grad for p in part.parameters.values() if p.grad is not None], most / norm)
    return norm
