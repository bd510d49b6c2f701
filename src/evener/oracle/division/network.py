"""A network as the operations that its division is decided on: shapes of a whole batch, windows, weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from evener.oracle.division.layout import Shape
from evener.oracle.division.windows import Window

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
    "other",
    "output",
]
Role: TypeAlias = Literal["kernel", "vector", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter or buffer of an operation.

    Attributes:
        name: within the operation's module.
        shape: of the whole.
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
    """One step of a network's forward pass.

    Attributes:
        name: of the module or function, for reports and weights; operations of one name share their weights.
        kind: decides how it can be divided. `average` is the mean over all rows and columns, `part` a stretch of the
            input's channels, `other` anything that needs its whole input.
        inputs: indices of earlier operations.
        shape: of the output: (N, C), (N, C, H, W) or any other.
        windows: of rows and columns, where the operation has them.
        groups: of channels that know nothing of each other.
        filter_dim: of the kernel, 0 or 1; the other one is that of channels.
        bounds: of a `part`, in channels of its input.
        concat_dim: of a `concat`.
        weights: parameters and buffers.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    shape: Shape
    windows: tuple[Window, ...] = ()
    groups: int = 1
    filter_dim: int = 0
    bounds: tuple[int, int] = (0, 0)
    concat_dim: int = 1
    weights: tuple[Weight, ...] = ()

    @property
    def is_image(self) -> bool:
        """Whether the output has rows and columns to divide: more than one pixel."""
        return len(self.shape) == 4 and self.shape[2] * self.shape[3] > 1


@dataclass(frozen=True)
class Network:
    """Operations in the order of execution; the last one is the only `output`.

    Attributes:
        operations: every input of one comes before it.
    """

    operations: tuple[Operation, ...]

    def users(self) -> dict[int, list[int]]:
        """By operation, those that read its output."""
        users: dict[int, list[int]] = {i: [] for i in range(len(self.operations))}
        for i, operation in enumerate(self.operations):
            for source in operation.inputs:
                users[source].append(i)
        return users

    def inputs_of(self, operation: Operation) -> Iterator[Operation]:
        """The operations whose outputs `operation` reads."""
        return (self.operations[i] for i in operation.inputs)
