"""A plan as instructions: which tensors to move, what to compute of them, and what is not needed any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.oracle.division.layout import Layout
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.batch_norm import untracked
from evener.parallel.operations import Nest, Reading, filled
from evener.parallel.pieces import Piece, Workbench, piece
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import Mover, mover
from evener.parallel.stretch import Row, compiled, is_local

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
        is_local: whether the piece needs nothing of other ranks.
    """

    moves: tuple[tuple[Held, Held, Mover], ...]
    inputs: tuple[Held, ...]
    piece: Piece | None
    output: Held
    done: tuple[Held, ...]
    is_local: bool = False

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add what this operation brings and makes to what is there."""
        for source, target, move in self.moves:
            held[target] = move(held[source])
        if self.piece is not None:
            held[self.output] = self.piece([held[name] for name in self.inputs])


class Stretch:
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
        places = {held: i for i, held in enumerate((*reads, *made))}
        self._reads, self._makes = tuple(reads), tuple(held for held in made if held not in self.done)
        rows = [
            Row(one.piece, tuple(places[held] for held in one.inputs), places[one.output])
            for one in instructions
            if one.piece is not None
        ]
        self._run = compiled(rows, len(reads), [places[held] for held in self._makes])

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add what the instructions make to what is there."""
        held.update(zip(self._makes, self._run(*(held[name] for name in self._reads)), strict=True))


class Program:
    """What this rank computes of a model, for one shape of its inputs.

    Args:
        reading: of the model.
        plan: of this rank's replica.
        model: this rank's part.
        place: of this rank.
        samples: (first one of this replica, number over all replicas) of the batch that is being computed.
        chunks: of the operations, of each of which backward keeps the ends and computes the rest again; 1 keeps all.
        compiles: whether what lies between exchanges is compiled.
    """

    def __init__(
        self,
        reading: Reading,
        plan: ReplicaPlan,
        model: nn.Module,
        place: ProcessMesh,
        samples: Callable[[], tuple[int, int]],
        chunks: int = 1,
        compiles: bool = False,
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
                    is_local=is_local(bench) if operation.kind not in ("input", "output", "constant") else False,
                )
            )
        self._given = [one.output for one, made in zip(instructions, operations, strict=True) if made.kind == "input"]
        self._results = instructions[-1].inputs
        length = -(-len(instructions) // chunks)
        self._recomputes = chunks > 1
        self._chunks = [Chunk(instructions[i : i + length], compiles) for i in range(0, len(instructions), length)]

    def __call__(self, inputs: Sequence[Tensor]) -> Nest:
        """The model's outputs for `inputs`, whole on every rank."""
        held: dict[Held, Tensor] = dict(zip(self._given, inputs, strict=True))
        for chunk in self._chunks:
            again = self._recomputes and torch.is_grad_enabled()
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
        compiles: whether what lies between exchanges is compiled.

    Attributes:
        reads: what has to be there before.
        makes: what is new afterwards.
        drops: what nobody needs any more.
    """

    def __init__(self, instructions: Sequence[Instruction], compiles: bool = False) -> None:
        self._parts = _stretches(instructions) if compiles else list(instructions)
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
        for one in self._parts:
            one.perform(held)
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


def _stretches(instructions: Sequence[Instruction]) -> list[Instruction | Stretch]:
    """The same work, with what lies between exchanges compiled."""
    apart: list[Instruction] = []
    for one in instructions:
        if one.moves and one.is_local:
            apart.append(replace(one, inputs=(), piece=None, done=(), is_local=False))
        apart.append(replace(one, moves=()) if one.is_local else one)
    found: list[Instruction | Stretch] = []
    for local, group in groupby(apart, lambda one: one.is_local):
        members = list(group)
        found += [Stretch(members)] if local else members
    return found
