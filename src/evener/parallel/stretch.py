"""Compiles what a rank computes between two exchanges: each stretch of operations of its own becomes one graph.

An exchange cannot be compiled, as it waits for others. What lies between two of them (normalisation, activation,
residual sum, the next convolution) can be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from evener.parallel.batch_norm import GroupBatchNorm
from evener.parallel.pieces import Piece, Workbench

_LOCAL = ("pointwise", "batch_norm", "concat", "part", "flatten", "average", "pool", "resize", "convolution", "linear")

Run = Callable[..., tuple[Tensor, ...]]


class Row(NamedTuple):
    """One operation of a stretch: `piece` of the values at `reads` makes the value at `makes`."""

    piece: Piece
    reads: tuple[int, ...]
    makes: int


def is_local(bench: Workbench) -> bool:
    """Whether this rank computes the operation on the bench by itself, and draws no random numbers for it."""
    kind, waits = bench.operation.kind, isinstance(bench.layer, GroupBatchNorm | nn.Dropout)
    return kind in _LOCAL and not waits and bench.step.choice.mode != "strip" and bench.step.halo is None


def compiled(rows: Sequence[Row], inputs: int, outputs: Sequence[int]) -> Run:
    """A compiled function of the values 0 to `inputs` - 1 that makes those at `outputs`."""
    count = 1 + max((row.makes for row in rows), default=inputs)
    steps = tuple(rows)

    def stretch(*tensors: Tensor) -> tuple[Tensor, ...]:
        values: list[Any] = [*tensors, *([None] * (count - inputs))]
        for step in steps:
            values[step.makes] = step.piece([values[i] for i in step.reads])
        return tuple(values[i] for i in outputs)

    return cast(Run, torch.compile(_with_code_of_its_own(stretch)))


def _with_code_of_its_own(function: Any) -> Any:
    """A copy of `function`: compilers count what they have compiled by code object, and give up after a few."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
