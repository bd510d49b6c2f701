"""The operations of a model as instructions for one rank: what to move, compute and free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from evener.oracle.division.layout import Layout
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel.local_ops import local_op
from evener.parallel.op_call import At, OpGraph
from evener.parallel.op_context import LocalOp, OpContext
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import Mover, mover
from evener.parallel.shared_statistics import shared_by
from evener.records.errors import note_place
from evener.tracer.hooks import without_traced_hooks

Held: TypeAlias = tuple[int, Layout]
"""A value of the model in one of its layouts."""
_LOCAL = ("pointwise", "batch_norm", "concat", "part", "flatten", "average", "pool", "resize", "convolution", "linear")


@dataclass(frozen=True)
class Instruction:
    """Perform one operation on this rank.

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
