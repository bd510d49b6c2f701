"""How many seconds every part of a model between two cuts takes, forward and backward.

They are measured, part by part on the device itself, so that a model need not fit it; or estimated without running
anything; or told by the user, as a cost of every operation (Huang et al., 2019, let a layer bring its own estimate).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evener.parallel.pipeline.partition import CutPoint, split
from evener.parallel.pipeline.partition_problem import OperationCost
from evener.parallel.pipeline.rng import StageRNG
from evener.parallel.pipeline.stage_modules import give_memory, targets_of, tree
from evener.parallel.pipeline.stage_program import StageProgram, compile_stage
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import on_meta
from evener.tracer.nested import tensors_in

CostFunction = Callable[[str, nn.Module | None], float]
"""Cost of an operation, from the path of the module around it (or that it is) and that module if it is one."""
Costs = Literal["measured", "estimated"] | CostFunction

_FLOPS_PER_BYTE = 10.0
"""Of a typical device: floating-point operations in the time of moving a byte to or from memory."""
_FLOPS_PER_SECOND = 1e10
_ROUNDS = 5
"""Of a measurement; the fastest counts, as whatever disturbs one makes it slower."""


def estimated_seconds(costs: Sequence[OperationCost]) -> list[float]:
    """Of every operation, by arithmetic or by memory traffic, whichever takes longer; only ratios hold."""
    return [max(s.flops, s.moved_bytes * _FLOPS_PER_BYTE) * 3 / _FLOPS_PER_SECOND for s in costs]


def told_seconds(traced: TracedModel, model: nn.Module, cost: CostFunction) -> list[float]:
    """Of every operation, in whatever unit the user's `cost` speaks."""
    found = []
    for node in traced.operations:
        is_module = node.op == "call_module"
        path = str(node.target) if is_module else record(node).module
        found.append(float(cost(path, model.get_submodule(path) if is_module else None)))
    return found


def measured_seconds(
    traced: TracedModel,
    model: nn.Module,
    points: Sequence[CutPoint],
    device: torch.device,
    loss: Callable[[Any], Tensor] | None = None,
) -> list[float]:
    """Of every part of `model` between two of `points`, forward and backward, measured on `device`.

    Parts are copied to the device one at a time and given random inputs. The `loss` of what the model returns, if it is
    given, is a part of the last one.
    """
    ends = [point.position for point in points] + [len(traced.operations)]
    stages = [number for number, (a, b) in enumerate(pairwise([0, *ends])) for _ in range(b - a)]
    skeleton = on_meta(model)
    found: list[float] = []
    for stage in split(traced, stages, len(ends)):
        root, _ = tree(skeleton, targets_of(stage.graph, traced.constants))
        give_memory(root, device, _fill)
        root.to(device)
        inputs = [_like(record(node).value, device) for node in stage.graph.nodes if node.op == "placeholder"]
        program = compile_stage(stage, root, traced, StageRNG(device))
        finish = loss if len(found) == len(points) else None
        found.append(min(_timed(program, inputs, device, finish) for _ in range(_ROUNDS)))
    return found


def _fill(_path: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.uniform_(tensor, 0.01, 0.1) if tensor.is_floating_point() else tensor.zero_()


def _like(value: Tensor, device: torch.device) -> Tensor:
    """Numbers of the shape of `value`: any, but indices that surely are in range."""
    if not value.is_floating_point():
        return torch.zeros_like(value, device=device)
    return torch.rand_like(value, device=device).requires_grad_(value.requires_grad)


def _timed(
    program: StageProgram, inputs: Sequence[Tensor], device: torch.device, loss: Callable[[Any], Tensor] | None
) -> float:
    """Seconds of one forward and backward pass."""
    begin = _now(device)
    outputs = program.run(*inputs)
    made = [tensor for tensor in tensors_in(loss(outputs) if loss else outputs) if tensor.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return _now(device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
