"""A model of Ultralytics and its moving average, as nodes agree on them that train by themselves.

The average is averaged with the same weights as the model, which is right, for it is linear in the model's weights. Its
tensors are buffers, so that nodes take the mean of them, whatever the server makes of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

LossAndParts = tuple[Tensor, dict[str, Tensor]]
"""The loss whose gradient is taken, and its parts without gradients, as a mean over the images."""


class AveragedNet(nn.Module):
    """A model that trains, beside the average that is evaluated.

    Args:
        model: of Ultralytics, with its settings.
        decay: (updates) -> part of the average that is kept.
        prepare: makes a loaded batch ready for the model.

    Attributes:
        model: itself.
        average: of its weights so far.
        updates: steps of all nodes together.
    """

    updates: Tensor

    def __init__(self, model: Any, decay: Callable[[int], float], prepare: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.average = _without_parameters(deepcopy(model)).eval()
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self._decay, self._prepare = decay, prepare
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None

    def forward(self, batch: Any) -> LossAndParts:
        """The loss of a batch: of the model where it trains, of the average where it is evaluated."""
        batch = self._prepare(batch)
        chosen = self.model if self.training else self.average
        vector, parts = self.model.loss(batch, chosen.predict(batch["img"]))
        return vector.sum(), parts

    def train(self, mode: bool = True) -> AveragedNet:
        """Have the model learn, or be evaluated; the average never learns."""
        super().train(mode)
        self.average.eval()
        return self

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the model, which has made a step."""
        self.updates += 1
        averages, values = self._pairs or self._paired()
        torch._foreach_lerp_(averages, values, 1 - self._decay(int(self.updates)))

    def _paired(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the average and those of the model, which stay the same objects."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        found = {name: tensor for name, tensor in self.average.named_buffers() if tensor.is_floating_point()}
        self._pairs = list(found.values()), [own[name].data for name in found]
        return self._pairs


def _without_parameters(model: Any) -> Any:
    """`model`, whose parameters have become buffers."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return model
