"""A plan as instructions: which tensors to move, what to compute of them, and what is not needed any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.oracle.division.layout import Layout
from evener.oracle.strategies import ReplicaPlan
from evener.parallel.moving import Mover, mover
from evener.parallel.normalisation import untracked
from evener.parallel.operations import Nest, Reading, filled
from evener.parallel.pieces import Piece, Workbench, piece
from evener.parallel.place import Place

Held: TypeAlias = tuple[int, Layout]
"""A value in one of its layouts."""


@dataclass(frozen=True)
class Instruction:
    """One operation of this rank.

    Attributes:
        moves: (from, to, how), in order.
        inputs: of the piece.
        piece: what is computed; None for an input of the model.
        output: what it makes.
        done: what nobody needs afterwards.
    """

    moves: tuple[tuple[Held, Held, Mover], ...]
    inputs: tuple[Held, ...]
    piece: Piece | None
    output: Held
    done: tuple[Held, ...]


class Program:
    """What this rank computes of a model, for one shape of its inputs.

    Args:
        reading: of the model.
        plan: of this rank's replica.
        model: this rank's part.
        place: of this rank.
        samples: (first one of this replica, number over all replicas) of the batch that is being computed.
        chunks: of the operations, of each of which backward keeps the ends and computes the rest again; 1 keeps all.
    """

    def __init__(
        self,
        reading: Reading,
        plan: ReplicaPlan,
        model: nn.Module,
        place: Place,
        samples: Callable[[], tuple[int, int]],
        chunks: int = 1,
    ) -> None:
        self._outputs, self._model = reading.outputs, model
        operations = reading.network.operations
        last = _last_uses(plan)
        instructions: list[Instruction] = []
        for index, (operation, step) in enumerate(zip(operations, plan.steps, strict=True)):
            inputs = tuple(operations[i] for i in operation.inputs)
            bench = Workbench(operation, inputs, step, reading.calls[index], model, place, samples)
            moves = tuple(((m.value, m.have), (m.value, m.need), mover(m, place.group)) for m in step.moves)
            instructions.append(
                Instruction(
                    moves=moves,
                    inputs=tuple(zip(operation.inputs, step.choice.needs, strict=True)),
                    piece=None if operation.kind in ("input", "output") else piece(bench),
                    output=(index, step.choice.gives),
                    done=tuple(held for held, user in last.items() if user == index),
                )
            )
        self._given = [one.output for one, made in zip(instructions, operations, strict=True) if made.kind == "input"]
        self._results = instructions[-1].inputs
        length = -(-len(instructions) // chunks)
        self._chunks = [Chunk(instructions[i : i + length]) for i in range(0, len(instructions), length)]

    def __call__(self, inputs: Sequence[Tensor]) -> Nest:
        """The model's outputs for `inputs`, whole on every rank."""
        held: dict[Held, Tensor] = dict(zip(self._given, inputs, strict=True))
        for chunk in self._chunks:
            again = len(self._chunks) > 1 and torch.is_grad_enabled()
            made = self._recomputed(chunk, held) if again else chunk.run(*(held[one] for one in chunk.reads))
            for one in chunk.drops:
                held.pop(one, None)
            held.update(zip(chunk.makes, made, strict=True))
        return filled(self._outputs, iter([held[one] for one in self._results]))

    def _recomputed(self, chunk: Chunk, held: dict[Held, Tensor]) -> tuple[Tensor, ...]:
        """What `chunk` makes; backward computes it once more, instead of keeping what is in between."""
        made: tuple[Tensor, ...] = checkpoint(
            chunk.run,
            *(held[one] for one in chunk.reads),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), untracked(self._model)),
        )
        return made


class Chunk:
    """Consecutive instructions.

    Args:
        instructions: in order.

    Attributes:
        reads: what has to be there before.
        makes: what is new afterwards.
        drops: what nobody needs any more.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        reads: dict[Held, None] = {}
        made: dict[Held, None] = {}
        for one in instructions:
            for source, target, _ in one.moves:
                reads |= {} if source in made else {source: None}
                made[target] = None
            reads |= {held: None for held in one.inputs if held not in made}
            made |= {one.output: None} if one.piece is not None else {}
        self.drops = {held for one in instructions for held in one.done}
        self.reads = tuple(reads)
        self.makes = tuple(held for held in made if held not in self.drops)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the chunk makes of what it reads."""
        held = dict(zip(self.reads, tensors, strict=True))
        del tensors
        for one in self._instructions:
            for source, target, move in one.moves:
                held[target] = move(held[source])
            if one.piece is not None:
                held[one.output] = one.piece([held[name] for name in one.inputs])
            for name in one.done:
                held.pop(name, None)
        return tuple(held[name] for name in self.makes)


def _last_uses(plan: ReplicaPlan) -> dict[Held, int]:
    """By value and layout, the operation that needs it last."""
    last: dict[Held, int] = {}
    for index, (operation, step) in enumerate(zip(plan.network.operations, plan.steps, strict=True)):
        last[index, step.choice.gives] = index
        for move in step.moves:
            last[move.value, move.have] = last[move.value, move.need] = index
        for value, need in zip(operation.inputs, step.choice.needs, strict=True):
            last[value, need] = index
    final = len(plan.steps) - 1
    return {held: index for held, index in last.items() if index < final}
