"""Filter parallelism: a rank has some filters of a convolution or linear layer, reads all channels, gives own outputs.

    y[own] = conv(x, w[own])            x: all channels that the own filters read

What is left of the module is the same module with fewer filters.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from evener.parallel.nothing import nothing


class OwnFilters:
    """A layer of this rank's filters.

    Args:
        layer: convolution or linear layer whose weights are the own ones.
        shape: of the own output; without filters it is empty.
    """

    def __init__(self, layer: nn.Module, shape: Sequence[int]) -> None:
        self._layer, self._shape = layer, shape

    def __call__(self, x: Tensor) -> Tensor:
        """The own outputs (N, own filters, ...)."""
        if 0 in self._shape:
            return nothing(self._shape, x, *self._layer.parameters())
        y: Tensor = self._layer(x)
        return y
