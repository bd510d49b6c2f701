"""A plan as a program: which tensors to move, what to compute, and which values to free.

Instruction    one operation of this rank: what to move, compute and free
RankProgram    all instructions, for one shape of the inputs, in segments
_Segment       consecutive instructions; with recomputation, backward recomputes a whole segment
_Compiled      the instructions of a segment between two exchanges, as one graph; an exchange waits for other ranks and
               cannot be compiled, but the operations between two of them can be fused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import isqrt
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.oracle.division.layout import Layout
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.local_ops import local_op
from evener.parallel.op_call import At, Nest, OpGraph, filled
from evener.parallel.op_context import LocalOp, OpContext
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import Mover, mover
from evener.parallel.shared_statistics import shared_by, untracked
from evener.records.errors import note_place
from evener.tracer.hooks import without_traced_hooks
from evener.tracer.meta_model import attribute

Held: TypeAlias = tuple[int, Layout]
"""A value of the model in one of its layouts."""
_LOCAL = ("pointwise", "batch_norm", "concat", "part", "flatten", "average", "pool", "resize", "convolution", "linear")


@dataclass(frozen=True)
class Instruction:
    """One operation of this rank, with the moves before it.

    Attributes:
        moves: (from, to, mover), in order.
        inputs: Inputs of the local operation.
        local_op: The local operation; None for an input of the model.
        output: The value that the operation makes.
        done: Values that are not needed afterwards.
        place: The operation's place in the model, as text.
        is_local: Whether the local operation needs nothing from other ranks.
        keeps_state: Whether it may change tensors of the model, other than those of a BatchNorm.
    """

    moves: tuple[tuple[Held, Held, Mover], ...]
    inputs: tuple[Held, ...]
    local_op: LocalOp | None
    output: Held
    done: tuple[Held, ...]
    place: str = ""
    is_local: bool = False
    keeps_state: bool = False

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add the values that this instruction moves and makes to `held`."""
        try:
            for source, target, move in self.moves:
                held[target] = move(held[source])
            if self.local_op is not None:
                held[self.output] = self.local_op([held[name] for name in self.inputs])
        except Exception as error:
            note_place(error, self.place)
            raise


def instructions(
    graph: OpGraph, plan: ReplicaPlan, model: nn.Module, mesh: ProcessMesh, samples: Callable[[], tuple[int, int, int]]
) -> Iterator[Instruction]:
    """Yield this rank's instruction for each operation of the graph; arguments as for `RankProgram`."""
    operations, last = graph.network.operations, _last_uses(plan)
    for index, (operation, step) in enumerate(zip(operations, plan.steps, strict=True)):
        ctx = OpContext(graph, index, step, model, mesh, samples)
        computes = operation.kind not in ("input", "output")
        yield Instruction(
            moves=tuple(((m.value, m.have), (m.value, m.need), mover(m, mesh.group)) for m in step.moves),
            inputs=tuple(zip(operation.inputs, step.choice.needs, strict=True)),
            local_op=_in_modes(local_op(ctx), ctx) if computes else None,
            output=(index, step.choice.gives),
            done=tuple(held for held, user in last.items() if user == index),
            place=ctx.call.line or operation.name,
            is_local=operation.kind in _LOCAL and _is_local(ctx),
            keeps_state=operation.kind == "whole" or _has_buffers(ctx),
        )


def _in_modes(compute: LocalOp, ctx: OpContext) -> LocalOp:
    """Return `compute` in the modes that the model sets around it, and for the module that it calls."""
    modes, module = ctx.call.modes, _module(ctx)
    if module is not None:
        without_traced_hooks(module)
        compute = _in_training_modes(compute, module, ctx.call.training) if ctx.call.training else compute
    if modes is None:
        return compute

    def run(inputs: Sequence[Tensor]) -> Tensor:
        with modes.applied():
            return compute(inputs)

    return run


def _in_training_modes(compute: LocalOp, module: nn.Module, training: Sequence[bool]) -> LocalOp:
    """Return `compute` with `module` and its submodules in the modes `training`, in order."""
    modules = list(zip(module.modules(), training, strict=True))

    def run(inputs: Sequence[Tensor]) -> Tensor:
        for one, mode in modules:
            one.training = mode
        return compute(inputs)

    return run


def _module(ctx: OpContext) -> nn.Module | None:
    """Return the model's module that is called; None if it is something else."""
    function = ctx.call.function
    return ctx.model.get_submodule(function.path) if isinstance(function, At) else None


def _has_buffers(ctx: OpContext) -> bool:
    """Return whether this is a module that may change its tensors. BatchNorms handle recomputation themselves."""
    module = _module(ctx) if ctx.operation.kind != "batch_norm" else None
    return module is not None and next(module.buffers(), None) is not None


def _is_local(ctx: OpContext) -> bool:
    """Return whether this rank computes the operation without other ranks and without random numbers."""
    waits = shared_by(ctx.layer) is not None or isinstance(ctx.layer, nn.Dropout) or ctx.call.is_random
    return not waits and ctx.step.choice.mode != "strip" and ctx.step.halo is None


def _last_uses(plan: ReplicaPlan) -> dict[Held, int]:
    """Return for each value and layout the operation that needs it last."""
    last: dict[Held, int] = {}
    for index, (operation, step) in enumerate(zip(plan.network.operations, plan.steps, strict=True)):
        last[index, step.choice.gives] = index
        for move in step.moves:
            last[move.value, move.have] = last[move.value, move.need] = index
        for value, need in zip(operation.inputs, step.choice.needs, strict=True):
            last[value, need] = index
    final = len(plan.steps) - 1
    return {held: index for held, index in last.items() if index < final}


Run: TypeAlias = Callable[..., tuple[Tensor, ...]]


class RankProgram:
    """This rank's part of a model, for one shape of its inputs.

    Args:
        graph: The model's operations.
        plan: The plan of this rank's replica.
        model: This rank's part of the model.
        mesh: The position of this rank.
        samples: Returns, for the current batch: first sample of this replica, its number of samples, number of all
            samples.
        recompute: Whether backward keeps only the ends of segments. A segment has about the square root of the number
            of operations, which needs the least memory at once.
        compiles: Whether operations between exchanges are compiled.
    """

    def __init__(
        self,
        graph: OpGraph,
        plan: ReplicaPlan,
        model: nn.Module,
        mesh: ProcessMesh,
        samples: Callable[[], tuple[int, int, int]],
        recompute: bool = False,
        compiles: bool = False,
    ) -> None:
        recompute = recompute and graph.is_repeatable
        self._outputs, self._model, self._recomputes = (graph.outputs, graph.states), model, recompute
        program = list(instructions(graph, plan, model, mesh, samples))
        kinds = [operation.kind for operation in graph.network.operations]
        self._placeholders = [one.output for one, kind in zip(program, kinds, strict=True) if kind == "input"]
        self._results = program[-1].inputs
        length = -(-len(program) // (isqrt(len(program)) if recompute else 1))
        self._segments = [_Segment(program[i : i + length], compiles) for i in range(0, len(program), length)]

    def __call__(self, inputs: Sequence[Tensor]) -> Nest:
        """Return the model's outputs for `inputs`, whole on every rank."""
        held: dict[Held, Tensor] = dict(zip(self._placeholders, inputs, strict=True))
        for segment in self._segments:
            again = self._recomputes and not segment.keeps_state and torch.is_grad_enabled()
            made = self._recomputed(segment, held) if again else segment.run(*(held[one] for one in segment.reads))
            for one in segment.drops:
                held.pop(one, None)
            held.update(zip(segment.makes, made, strict=True))
        outputs, states = filled(self._outputs, iter([held[one] for one in self._results]))
        for name, value in states.items():
            path, _, last = name.rpartition(".")
            buffers = self._model.get_submodule(path)._buffers
            buffers[last] = value.detach().to(attribute(self._model, name).dtype)
        return outputs

    def _recomputed(self, segment: _Segment, held: dict[Held, Tensor]) -> tuple[Tensor, ...]:
        """Return the results of `segment`; backward recomputes what lies inside."""
        made: tuple[Tensor, ...] = checkpoint(
            segment.run,
            *(held[one] for one in segment.reads),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), untracked(self._model)),
        )
        return made


class _Segment:
    """A sequence of consecutive instructions.

    Attributes:
        reads: Values that the segment needs.
        makes: Values that it produces.
        drops: Values that are not needed afterwards.
        keeps_state: Whether it may change tensors of the model, and must not be recomputed.
    """

    def __init__(self, instructions: Sequence[Instruction], compiles: bool) -> None:
        self._parts = _with_compiled(instructions) if compiles else list(instructions)
        reads: dict[Held, None] = {}
        made: dict[Held, None] = {}
        for one in instructions:
            for source, target, _ in one.moves:
                reads |= {} if source in made else {source: None}
                made[target] = None
            reads |= {held: None for held in one.inputs if held not in made}
            made |= {one.output: None} if one.local_op is not None else {}
        self.keeps_state = any(one.keeps_state for one in instructions)
        self.drops = {held for one in instructions for held in one.done}
        self.reads = tuple(reads)
        self.makes = tuple(held for held in made if held not in self.drops)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the values that the segment produces."""
        held = dict(zip(self.reads, tensors, strict=True))
        del tensors
        for one in self._parts:
            one.perform(held)
            for name in one.done:
                held.pop(name, None)
        return tuple(held[name] for name in self.makes)


def _with_compiled(instructions: Sequence[Instruction]) -> list[Instruction | _Compiled]:
    """Return the same instructions, with those between exchanges compiled."""
    apart: list[Instruction] = []
    for one in instructions:
        if one.moves and one.is_local:
            apart.append(replace(one, inputs=(), local_op=None, done=(), is_local=False))
        apart.append(replace(one, moves=()) if one.is_local else one)
    parts: list[Instruction | _Compiled] = []
    for local, group in groupby(apart, lambda one: one.is_local):
        members = list(group)
        parts += [_Compiled(members)] if local else members
    return parts


class _Compiled:
    """A sequence of consecutive instructions that move nothing, as one compiled function.

    Attributes:
        done: Values that are not needed afterwards.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        made = [one.output for one in instructions]
        reads = dict.fromkeys(held for one in instructions for held in one.inputs if held not in made)
        self.done = tuple(held for one in instructions for held in one.done)
        self._reads, self._makes = tuple(reads), tuple(held for held in made if held not in self.done)
        self._run: Run = torch.compile(self._function([*reads, *made], instructions))

    def perform(self, held: dict[Held, Tensor]) -> None:
        """Add the results of the instructions to `held`."""
        held.update(zip(self._makes, self._run(*(held[name] for name in self._reads)), strict=True))

    def _function(self, all_values: Sequence[Held], instructions: Sequence[Instruction]) -> Run:
        """Return a function from the values read to the values made; the compiler sees them by number."""
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
            for compute, reads, makes in steps:
                values[makes] = compute([values[i] for i in reads])
            return tuple(values[i] for i in outputs)

        return cast(Run, _with_own_code(segment))


def _with_own_code(function: Any) -> Any:
    """Return a copy of `function` with its own code object.

    Compilers count compilations per code object and give up after a few.
    """
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return FunctionType(function.__code__.replace(), *parts)
