"""What a rank computes between two exchanges, compiled into one graph.

An exchange cannot be compiled, as it waits for others. What lies between two of them (normalisation, activation,
residual sum, the next convolution) can be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from evener.oracle.division.layout import Layout
from evener.parallel.batch_norm import GroupBatchNorm
from evener.parallel.local_ops import LocalOp, OpContext
from evener.parallel.redistribute import Mover

_LOCAL = ("pointwise", "batch_norm", "concat", "part", "flatten", "average", "pool", "resize", "convolution", "linear")


def is_local(ctx: OpContext) -> bool:
    """Whether this rank computes the operation by itself, and draws no random numbers for it."""
    kind, waits = ctx.operation.kind, isinstance(ctx.layer, GroupBatchNorm | nn.Dropout) or ctx.call.is_random
    return kind in _LOCAL and not waits and ctx.step.choice.mode != "strip" and ctx.step.halo is None


Run: TypeAlias = Callable[..., tuple[Tensor, ...]]
Held: TypeAlias = tuple[int, Layout]
"""A value in one of its layouts."""


@dataclass(frozen=True)
class Instruction:
    """One operation of this rank.

    Attributes:
        moves: (from, to, how), in order.
        inputs: of the local operation.
        local_op: what is computed; None for an input of the model.
        output: what it makes.
        done: what nobody needs afterwards.
        is_local: whether the local operation needs nothing of other ranks.
    """

    moves: tuple[tuple[Held, Held, Mover], ...]
    inputs: tuple[Held, ...]
    local_op: LocalOp | None
    output: Held
    done: tuple[Held, ...]
    is_local: bool = False

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add what this operation brings and makes to what is there."""
        for source, target, move in self.moves:
            held[target] = move(held[source])
        if self.local_op is not None:
            held[self.output] = self.local_op([held[name] for name in self.inputs])


class CompiledSegment:
    """Consecutive instructions without exchanges, compiled.

    Args:
        instructions: in order; none of them moves anything.

    Attributes:
        done: what nobody needs afterwards.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        made = [one.output for one in instructions]
        reads = dict.fromkeys(held for one in instructions for held in one.inputs if held not in made)
        self.done = tuple(held for one in instructions for held in one.done)
        self._reads, self._makes = tuple(reads), tuple(held for held in made if held not in self.done)
        self._run: Run = torch.compile(self._function([*reads, *made], instructions))

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add what the instructions make to what is there."""
        held.update(zip(self._makes, self._run(*(held[name] for name in self._reads)), strict=True))

    def _function(self, all_values: Sequence[Held], instructions: Sequence[Instruction]) -> Run:
        """A function from the values that are read to those that are made, which are numbered for the compiler."""
        number = {held: i for i, held in enumerate(all_values)}
        steps = tuple(
            (one.local_op, tuple(number[held] for held in one.inputs), number[one.output])
            for one in instructions
            if one.local_op is not None
        )
        outputs = tuple(number[held] for held in self._makes)
        unmade = len(all_values) - len(self._reads)

        def segment(*tensors: Tensor) -> tuple[Tensor, ...]:
            values: list[Any] = [*tensors, *([None] * unmade)]
            for local_op, reads, makes in steps:
                values[makes] = local_op([values[i] for i in reads])
            return tuple(values[i] for i in outputs)

        return cast(Run, _with_code_of_its_own(segment))


def _with_code_of_its_own(function: Any) -> Any:
    """A copy of `function`: compilers count what they have compiled by code object, and give up after a few."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
