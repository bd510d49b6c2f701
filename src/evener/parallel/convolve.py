"""A convolution of a rectangle of an image, forward and backward: zeros around it, and no copy where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evener.oracle.division.windows import Sliding
from evener.parallel.image import Rectangle, margins, reached, surround


@dataclass(frozen=True)
class Convolution:
    """Computes `outputs` of a convolution from the pixels `held`, taking all others for zero.

    Attributes:
        windows: of rows and columns.
        groups: of channels.
        held: what the input holds.
        outputs: to be computed; not empty.
    """

    windows: tuple[Sliding, Sliding]
    groups: int
    held: Rectangle
    outputs: Rectangle

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs, (N, F, rows, columns), from `x` (N, C, rows, columns)."""
        padding, x = self._pad(x)
        return torch.ops.aten.convolution(x, weight, bias, *self._settings(padding))  # type: ignore[no-any-return]

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias, as far as `wanted`."""
        padding, padded = self._pad(x)
        sizes = [weight.shape[0]]
        dx, d_weight, d_bias = torch.ops.aten.convolution_backward(
            dy, padded, weight, sizes, *self._settings(padding), list(wanted)
        )
        if dx is not None and padded is not x:
            dx = surround(dx, reached(self.windows, self.outputs), self.held)
        return dx, d_weight, d_bias

    @property
    def _margins(self) -> tuple[int, int, int, int]:
        return margins(self.held, reached(self.windows, self.outputs))

    def _pad(self, x: Tensor) -> tuple[list[int], Tensor]:
        """The padding that the kernel itself can add, and `x` with what it cannot."""
        left, right, top, bottom = self._margins
        own = zip(self.windows, ((top, bottom), (left, right)), self.held.shape, self.outputs.shape, strict=True)
        if all(_adds_itself(*one) for one in own):
            return [top, left], x
        return [0, 0], surround(x, self.held, reached(self.windows, self.outputs))

    def _settings(self, padding: list[int]) -> tuple[object, ...]:
        strides, dilations = ([getattr(w, name) for w in self.windows] for name in ("stride", "dilation"))
        return strides, padding, dilations, False, [0, 0], self.groups


def _adds_itself(window: Sliding, around: tuple[int, int], inputs: int, outputs: int) -> bool:
    """Whether as much padding behind as there is before gives as many outputs as there should be."""
    before, behind = around
    return before >= behind >= 0 and (inputs + 2 * before - window.extent) // window.stride + 1 == outputs
