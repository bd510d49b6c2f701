"""Which rows (or columns) of its input an operation reads for some of its output: the arithmetic behind every halo.

Outputs [first, last) read the inputs that `reach` returns. These may lie beyond the input, where there is padding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil, floor
from typing import Protocol

from evener.oracle.division.layout import Interval


class Window(Protocol):
    """How one dim of an output depends on that dim of the input."""

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that outputs [first, last) read; `first < last`."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """A convolution or pooling: output o reads inputs o * stride - before + dilation * (0 .. kernel-1)."""

    kernel: int
    stride: int
    before: int
    dilation: int = 1

    @property
    def extent(self) -> int:
        """From the first input that a window reads to behind the last."""
        return self.dilation * (self.kernel - 1) + 1

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that outputs [first, last) read."""
        return first * self.stride - self.before, (last - 1) * self.stride - self.before + self.extent

    def touched(self, first: int, last: int) -> Interval:
        """The outputs whose windows lie over any of the inputs [first, last)."""
        return -((self.extent - 1 - self.before - first) // self.stride), (last - 1 + self.before) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Spreading:
    """A transposed convolution: input i adds to outputs i * stride - padding + dilation * (0 .. kernel-1)."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that add to outputs [first, last)."""
        begin = first + self.padding - self.dilation * (self.kernel - 1)
        return -(-begin // self.stride), (last - 1 + self.padding) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Adaptive pooling from `inputs` to `outputs`: output o reads from floor(o n/m) to ceil((o+1) n/m)."""

    inputs: int
    outputs: int

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that outputs [first, last) read."""
        return first * self.inputs // self.outputs, -(-last * self.inputs // self.outputs)


@dataclass(frozen=True, slots=True)
class Nearest:
    """Interpolation of `inputs` that copies: output o is input floor(o * scale), in PyTorch's single precision."""

    inputs: int
    scale: float

    def source(self, output: int) -> int:
        """The input that `output` copies."""
        return min(floor(_single(output * _single(self.scale))), self.inputs - 1)

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that outputs [first, last) copy."""
        return self.source(first), self.source(last - 1) + 1


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear interpolation of `inputs`: output o lies at input (o + shift) * scale - shift, between two of them.

    Attributes:
        inputs: size of the input.
        scale: inputs for each output.
        shift: 0.5 where pixels are areas, 0 where the corners are aligned.
    """

    inputs: int
    scale: float
    shift: float

    def place(self, output: int) -> float:
        """Where `output` lies among the inputs, not before the first and not behind the last."""
        return min(max(0.0, (output + self.shift) * self.scale - self.shift), self.inputs - 1)

    def reach(self, first: int, last: int) -> Interval:
        """The inputs that outputs [first, last) mix."""
        return floor(self.place(first)), ceil(self.place(last - 1)) + 1


def _single(value: float) -> float:
    """`value`, rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
