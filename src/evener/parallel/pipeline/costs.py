"""What every part of a model between two cuts costs: seconds, bytes kept for backward, bytes of weights.

Seconds are measured, part by part on the device itself, so that a model need not fit it; or estimated without running
anything; or told by the user, as a cost of every operation (Huang et al., 2019, let a layer bring its own estimate).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import FlopCounterMode

from evener.parallel.pipeline.cut import Cut
from evener.parallel.pipeline.materialise import give_memory
from evener.parallel.pipeline.parts import targets_of, tree
from evener.parallel.pipeline.program import Program, compile_stage
from evener.parallel.pipeline.randomness import Dice
from evener.parallel.pipeline.skeleton import on_meta, storage_of, without_memory
from evener.parallel.pipeline.split import split
from evener.parallel.pipeline.tensors import tensors_in
from evener.parallel.pipeline.trace import Trace

Cost = Callable[[str, nn.Module | None], float]
"""Cost of an operation, from the path of the module around it (or that it is) and that module if it is one."""
Costs = Literal["measured", "estimated"] | Cost

_FLOPS_PER_BYTE = 10.0
"""Of a typical device: floating-point operations in the time of moving a byte to or from memory."""
_FLOPS_PER_SECOND = 1e10
_ROUNDS = 5
"""Of a measurement; the fastest counts, as whatever disturbs one makes it slower."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What one operation takes, for the traced number of samples.

    Attributes:
        flops: of the forward pass.
        moved_bytes: read and written.
        kept_bytes: that backward needs and no operation before has kept.
        weight_bytes: of trained parameters that no operation before has used.
    """

    flops: float
    moved_bytes: int
    kept_bytes: int
    weight_bytes: int


def spent(trace: Trace, model: nn.Module) -> list[Spent]:
    """What every operation of the traced `model` takes; nothing is computed."""
    meter = _Meter(without_memory(model), trace)
    with torch.enable_grad(), meter.flops:
        meter.run(*(node.meta["value"] for node in trace.graph.nodes if node.op == "placeholder"))
    return [meter.found[node] for node in trace.operations]


class _Meter(fx.Interpreter):
    """Runs a graph on the meta device and notes what every operation takes."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        for name, tensor in trace.constants.items():
            model.register_buffer(name, on_meta(tensor))
        super().__init__(fx.GraphModule(model, trace.graph), garbage_collect_values=False)
        self.flops = FlopCounterMode(display=False)
        self.found: dict[fx.Node, Spent] = {}
        self._own = model
        self._known = {storage_of(t): t for t in (*model.parameters(), *model.buffers())}
        self._used: set[int] = set()
        self._kept = 0

    def run_node(self, n: fx.Node) -> Any:
        before, self._kept = self.flops.get_total_flops(), 0
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            value = super().run_node(n)
        if n.op.startswith("call"):
            inputs = [self.env[node] for node in n.all_input_nodes]
            self.found[n] = Spent(
                flops=self.flops.get_total_flops() - before,
                moved_bytes=sum(tensor.nbytes for tensor in tensors_in((inputs, value))),
                kept_bytes=self._kept,
                weight_bytes=self._new_weights(n),
            )
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return map_aggregate(super().fetch_args_kwargs_from_env(n), on_meta)

    def _keep(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self._known:
            self._known[storage_of(tensor)] = tensor  # held, so that its storage is not given to another
            self._kept += tensor.untyped_storage().nbytes()
        return tensor

    def _new_weights(self, node: fx.Node) -> int:
        owners = list(self._own.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
        owners += [value for value in (self.env[i] for i in node.all_input_nodes) if isinstance(value, nn.Parameter)]
        new = {id(p): p for p in owners if p.requires_grad and id(p) not in self._used}
        self._used |= set(new)
        return sum(parameter.nbytes for parameter in new.values())


def estimated_seconds(spendings: Sequence[Spent]) -> list[float]:
    """Of every operation, by arithmetic or by memory traffic, whichever takes longer; only ratios hold."""
    return [max(s.flops, s.moved_bytes * _FLOPS_PER_BYTE) * 3 / _FLOPS_PER_SECOND for s in spendings]


def told_seconds(trace: Trace, model: nn.Module, cost: Cost) -> list[float]:
    """Of every operation, in whatever unit the user's `cost` speaks."""
    found = []
    for node in trace.operations:
        is_module = node.op == "call_module"
        path = str(node.target) if is_module else node.meta["module"]
        found.append(float(cost(path, model.get_submodule(path) if is_module else None)))
    return found


def measured_seconds(trace: Trace, model: nn.Module, places: Sequence[Cut], device: torch.device) -> list[float]:
    """Of every part of `model` between two of `places`, forward and backward, measured on `device`.

    Parts are copied to the device one at a time and given random inputs.
    """
    ends = [place.position for place in places] + [len(trace.operations)]
    stages = [number for number, (a, b) in enumerate(pairwise([0, *ends])) for _ in range(b - a)]
    skeleton = without_memory(model)
    found = []
    for stage in split(trace, stages, len(ends)):
        root, _ = tree(skeleton, targets_of(stage.graph, trace.constants))
        give_memory(root, device, _fill)
        root.to(device)
        inputs = [_like(node.meta["value"], device) for node in stage.graph.nodes if node.op == "placeholder"]
        program = compile_stage(stage, root, trace, Dice(device))
        found.append(min(_timed(program, inputs, device) for _ in range(_ROUNDS)))
    return found


def _fill(_path: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.uniform_(tensor, 0.01, 0.1) if tensor.is_floating_point() else tensor.zero_()


def _like(value: Tensor, device: torch.device) -> Tensor:
    """Numbers of the shape of `value`: any, but indices that surely are in range."""
    if not value.is_floating_point():
        return torch.zeros_like(value, device=device)
    return torch.rand_like(value, device=device).requires_grad_(value.requires_grad)


def _timed(program: Program, inputs: Sequence[Tensor], device: torch.device) -> float:
    """Seconds of one forward and backward pass."""
    begin = _now(device)
    made = [tensor for tensor in tensors_in(program.run(*inputs)) if tensor.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return _now(device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
