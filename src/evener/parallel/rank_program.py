"""A plan as instructions: which tensors to move, what to compute of them, and what is not needed any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from math import isqrt

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.batch_norm import untracked
from evener.parallel.compiled_segment import CompiledSegment, Held, Instruction, is_local
from evener.parallel.local_ops import OpContext, local_op
from evener.parallel.op_graph import Nest, OpGraph, filled
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import mover


class RankProgram:
    """What this rank computes of a model, for one shape of its inputs.

    Args:
        graph: of the model.
        plan: of this rank's replica.
        model: this rank's part.
        mesh: where this rank is.
        samples: (first one of this replica, number over all replicas) of the batch that is being computed.
        recompute: whether backward keeps only the ends of about the root of the number of operations, and computes the
            rest again: those segments that keep the least at once.
        compiles: whether what lies between exchanges is compiled.
    """

    def __init__(
        self,
        graph: OpGraph,
        plan: ReplicaPlan,
        model: nn.Module,
        mesh: ProcessMesh,
        samples: Callable[[], tuple[int, int]],
        recompute: bool = False,
        compiles: bool = False,
    ) -> None:
        self._outputs, self._model = graph.outputs, model
        operations = graph.network.operations
        last = _last_uses(plan)
        instructions: list[Instruction] = []
        for index, (operation, step) in enumerate(zip(operations, plan.steps, strict=True)):
            inputs = tuple(operations[i] for i in operation.inputs)
            ctx = OpContext(operation, inputs, step, graph.calls[index], model, mesh, samples)
            moves = tuple(((m.value, m.have), (m.value, m.need), mover(m, mesh.group)) for m in step.moves)
            instructions.append(
                Instruction(
                    moves=moves,
                    inputs=tuple(zip(operation.inputs, step.choice.needs, strict=True)),
                    local_op=None if operation.kind in ("input", "output") else local_op(ctx),
                    output=(index, step.choice.gives),
                    done=tuple(held for held, user in last.items() if user == index),
                    is_local=is_local(ctx) if operation.kind not in ("input", "output", "constant") else False,
                )
            )
        self._given = [one.output for one, made in zip(instructions, operations, strict=True) if made.kind == "input"]
        self._results = instructions[-1].inputs
        length = -(-len(instructions) // (isqrt(len(instructions)) if recompute else 1))
        self._recomputes = recompute
        self._segments = [
            ProgramSegment(instructions[i : i + length], compiles) for i in range(0, len(instructions), length)
        ]

    def __call__(self, inputs: Sequence[Tensor]) -> Nest:
        """The model's outputs for `inputs`, whole on every rank."""
        held: dict[Held, Tensor] = dict(zip(self._given, inputs, strict=True))
        for segment in self._segments:
            again = self._recomputes and torch.is_grad_enabled()
            made = self._recomputed(segment, held) if again else segment.run(*(held[one] for one in segment.reads))
            for one in segment.drops:
                held.pop(one, None)
            held.update(zip(segment.makes, made, strict=True))
        return filled(self._outputs, iter([held[one] for one in self._results]))

    def _recomputed(self, segment: ProgramSegment, held: dict[Held, Tensor]) -> tuple[Tensor, ...]:
        """What `segment` makes; backward computes it once more, instead of keeping what is in between."""
        made: tuple[Tensor, ...] = checkpoint(
            segment.run,
            *(held[one] for one in segment.reads),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), untracked(self._model)),
        )
        return made


class ProgramSegment:
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
        self._parts = _compiled(instructions) if compiles else list(instructions)
        reads: dict[Held, None] = {}
        made: dict[Held, None] = {}
        for one in instructions:
            for source, target, _ in one.moves:
                reads |= {} if source in made else {source: None}
                made[target] = None
            reads |= {held: None for held in one.inputs if held not in made}
            made |= {one.output: None} if one.local_op is not None else {}
        self.drops = {held for one in instructions for held in one.done}
        self.reads = tuple(reads)
        self.makes = tuple(held for held in made if held not in self.drops)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the segment makes of what it reads."""
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


def _compiled(instructions: Sequence[Instruction]) -> list[Instruction | CompiledSegment]:
    """The same work, with what lies between exchanges compiled."""
    apart: list[Instruction] = []
    for one in instructions:
        if one.moves and one.is_local:
            apart.append(replace(one, inputs=(), local_op=None, done=(), is_local=False))
        apart.append(replace(one, moves=()) if one.is_local else one)
    found: list[Instruction | CompiledSegment] = []
    for local, group in groupby(apart, lambda one: one.is_local):
        members = list(group)
        found += [CompiledSegment(members)] if local else members
    return found
