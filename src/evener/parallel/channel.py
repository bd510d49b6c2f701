"""Channel parallelism: a rank has some input channels of a convolution or linear layer and gives addends of outputs.

    y = sum over ranks of conv(x[own], w[:, own])

The bias is divided by filters: each rank adds its part to its addend, so that every filter's is added once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from evener.oracle.division.layout import Intervals
from evener.parallel.nothing import nothing


class OwnChannels:
    """A layer of this rank's input channels.

    Args:
        layer: convolution or linear layer whose weights, and bias, are the own ones.
        adds: filters whose bias this rank has.
        shape: of the output.
    """

    def __init__(self, layer: nn.Module, adds: Intervals, shape: Sequence[int]) -> None:
        self._layer, self._shape = layer, shape
        self._adds = torch.tensor([i for a, b in adds for i in range(a, b)], dtype=torch.long)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's addend of the output."""
        bias = self._bias()
        if x.numel() == 0:
            y = nothing(self._shape, x, *self._layer.parameters())
            return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * (len(self._shape) - 2))
        changed = {} if bias is None else {"bias": bias}
        z: Tensor = functional_call(self._layer, changed, (x,)) if changed else self._layer(x)
        return z

    def _bias(self) -> Tensor | None:
        """A bias of all filters, zero where another rank adds it."""
        own = self._layer.bias
        if not isinstance(own, Tensor):
            return None
        return own.new_zeros(self._shape[1]).index_copy(0, self._adds.to(own.device), own)
