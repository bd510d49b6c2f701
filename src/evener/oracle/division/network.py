"""A network as the operations whose division is decided: shapes of a full batch, windows, weights. No torch.

A window says which rows (or columns) of its input an operation reads for some rows of its output. All halos follow from
it: outputs [first, last) read the inputs that `reach` returns, some of which may be padding around the input.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil, floor, prod
from typing import Literal, Protocol, TypeAlias

from evener.oracle.division.layout import Interval, Shape

Kind: TypeAlias = Literal[
    "input",
    "constant",
    "convolution",
    "linear",
    "pool",
    "resize",
    "average",
    "pointwise",
    "batch_norm",
    "group_norm",
    "concat",
    "part",
    "flatten",
    "item",
    "other",
    "whole",
    "output",
]
Role: TypeAlias = Literal["kernel", "vector", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter or buffer of an operation.

    Attributes:
        name: name within the operation's module.
        shape: shape of the complete weight.
        role: `kernel`: has a dim of filters and one of channels. `vector`: has a number for every channel of the
            output. `free`: has no such dim.
        trainable: whether it has a gradient.
    """

    name: str
    shape: Shape
    role: Role
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a network's forward pass.

    Attributes:
        name: name of the module or function, for reports and weights; operations of one name share their weights.
        kind: decides how it can be divided. `average` is the mean over all pixels, `part` an interval of the input's
            channels, `item` one of several values that its input holds. `other` needs its complete input, `whole` its
            complete gradient, too.
        inputs: indices of earlier operations.
        shape: shape of the output: (N, C), (N, C, H, W), (N, C, D, H, W) or any other.
        windows: windows of rows and columns (of a volume: planes, rows, columns), where the operation has them.
        groups: number of groups of channels that are independent of each other.
        filter_dim: dim of filters in the kernel, 0 or 1; the other one is that of channels.
        bounds: for a `part`, its first and last channel in the input.
        concat_dim: for a `concat`, the dim of concatenation.
        weights: parameters and buffers.
        shares_weights: whether operations of other kinds use one of its weights, too: all ranks' gradients are summed.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    shape: Shape
    windows: tuple[WindowRule, ...] = ()
    groups: int = 1
    filter_dim: int = 0
    bounds: tuple[int, int] = (0, 0)
    concat_dim: int = 1
    weights: tuple[Weight, ...] = ()
    shares_weights: bool = False

    @property
    def is_image(self) -> bool:
        """Whether the output is images or volumes of more than one pixel, whose sides can be divided."""
        return len(self.shape) in (4, 5) and prod(self.shape[2:]) > 1


@dataclass(frozen=True)
class Network:
    """Operations in the order of execution; the last one is the only `output`.

    Attributes:
        operations: the inputs of each operation come before it.
    """

    operations: tuple[Operation, ...]

    def users(self) -> dict[int, list[int]]:
        """Return, for each operation, those that read its output."""
        users: dict[int, list[int]] = {i: [] for i in range(len(self.operations))}
        for i, operation in enumerate(self.operations):
            for source in operation.inputs:
                users[source].append(i)
        return users


class WindowRule(Protocol):
    """How one dim of an output depends on that dim of the input."""

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that outputs [first, last) read; `first < last`."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """A convolution or pooling: output o reads inputs o * stride - before + dilation * (0 .. kernel-1)."""

    kernel: int
    stride: int
    before: int
    dilation: int = 1

    @property
    def extent(self) -> int:
        """The distance from the first input that a window reads to behind the last."""
        return self.dilation * (self.kernel - 1) + 1

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that outputs [first, last) read."""
        return first * self.stride - self.before, (last - 1) * self.stride - self.before + self.extent

    def touched(self, first: int, last: int) -> Interval:
        """Return the outputs whose windows cover any of the inputs [first, last)."""
        return -((self.extent - 1 - self.before - first) // self.stride), (last - 1 + self.before) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Spreading:
    """A transposed convolution: input i adds to outputs i * stride - padding + dilation * (0 .. kernel-1)."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that add to outputs [first, last)."""
        begin = first + self.padding - self.dilation * (self.kernel - 1)
        return -(-begin // self.stride), (last - 1 + self.padding) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Adaptive pooling from `inputs` to `outputs`: output o reads from floor(o n/m) to ceil((o+1) n/m)."""

    inputs: int
    outputs: int

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that outputs [first, last) read."""
        return first * self.inputs // self.outputs, -(-last * self.inputs // self.outputs)


@dataclass(frozen=True, slots=True)
class Nearest:
    """Nearest interpolation of `inputs`: output o is input floor(o * scale), in PyTorch's single precision."""

    inputs: int
    scale: float

    def source(self, output: int) -> int:
        """Return the input that `output` copies."""
        return min(floor(_single(output * _single(self.scale))), self.inputs - 1)

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that outputs [first, last) copy."""
        return self.source(first), self.source(last - 1) + 1


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear interpolation of `inputs`: output o lies at input (o + shift) * scale - shift, between two of them.

    Attributes:
        inputs: size of the input.
        scale: inputs per output.
        shift: 0.5 where pixels are areas, 0 where the corners are aligned.
    """

    inputs: int
    scale: float
    shift: float

    def position(self, output: int) -> float:
        """Return the position of `output` among the inputs, clamped to the first and last input."""
        return min(max(0.0, (output + self.shift) * self.scale - self.shift), self.inputs - 1)

    def reach(self, first: int, last: int) -> Interval:
        """Return the inputs that outputs [first, last) interpolate between."""
        return floor(self.position(first)), ceil(self.position(last - 1)) + 1


def _single(value: float) -> float:
    """Return `value`, rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
