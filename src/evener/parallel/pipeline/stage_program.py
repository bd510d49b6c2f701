"""Executable programs of a stage's graph, with the stage's modules, seeds of random operations, and modes.

A program is made for each new shape or mode, and cached. Before a model is cut, every part between two cut points is
made and timed on the device separately, so that the model need not fit the device.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from evener.parallel.pipeline.partition_problem import PartitionProblem, trace_micro_batch
from evener.parallel.pipeline.stage_layout import BoundaryTensor, StageGraph, StageLayout, split, stages_in
from evener.parallel.pipeline.stage_modules import StageModules, StageRNG, attach, give_memory, targets_of, tree
from evener.system import accelerators
from evener.tracer.ir import TorchModes, TracedModel, assign, record
from evener.tracer.meta_model import attribute, on_meta
from evener.tracer.nested import map_values, tensors_in, values_in

_PASSES, _ROUNDS = 3, 4
"""Passes over all parts, and rounds of each part in a pass; the fastest counts, because disturbances only slow a round
down, and most are shorter than a pass."""
_MAX_SECONDS = 2.0
"""Time after which no further pass begins."""


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One stage, compiled for micro-batches of one shape.

    Attributes:
        run: Maps `inputs` (the first stage: the model's inputs) to a tuple of `outputs` (the last stage: the model's
            outputs).
        inputs: Values of earlier stages.
        outputs: Values for later stages.
    """

    run: Callable[..., Any]
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]


def compile_stage(stage: StageGraph, root: nn.Module, traced: TracedModel, rng: StageRNG) -> StageProgram:
    """Return the program of `stage`, a part of `traced`, with the modules in `root`. This changes the stage's graph."""
    for node in stage.graph.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: rng.device if value == traced.device else value
        )
        function = _function_of(node, root, traced, rng)
        if function is not None:
            node.target, node.op = function, "call_function"
    run = fx.GraphModule(nn.Module(), stage.graph)  # an empty root: the graph uses no names of the model
    return StageProgram(run=_returning(stage.returns, run), inputs=stage.inputs, outputs=stage.outputs)


def _returning(nest: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, with its plain results in the nested types of `nest`, which the model returns."""
    if isinstance(nest, fx.Node | None):
        return run

    def returning(*inputs: Any) -> Any:
        values = values_in(run(*inputs))
        return map_values(nest, lambda _: next(values))

    return returning


def _function_of(node: fx.Node, root: nn.Module, traced: TracedModel, rng: StageRNG) -> Callable[..., Any] | None:
    """Return the function that computes `node`; None if its target is enough."""
    name = str(node.target)
    if node.op == "get_attr" and name in traced.constants:
        constant = traced.constants[name].to(rng.device)
        return lambda: constant
    if node.op == "get_attr":
        return _reader(root, name)
    if not node.op.startswith("call"):
        return None
    if node.target is assign:
        return _assigner(root, str(node.args[1]))
    seen = record(node)
    is_plain = not seen.is_random and seen.modes is None
    if is_plain and node.op != "call_module":
        return None
    function = _callable(node, root)
    return function if is_plain else _wrapped(function, rng, seen.number if seen.is_random else None, seen.modes)


def _callable(node: fx.Node, root: nn.Module) -> Callable[..., Any]:
    name, target = str(node.target), node.target
    if node.op == "call_module":
        return _caller(root.get_submodule(name), record(node).training)
    if node.op == "call_method":
        return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    assert callable(target)
    return target


def _reader(root: nn.Module, name: str) -> Callable[[], Any]:
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return lambda: getattr(owner, last)


def _assigner(root: nn.Module, name: str) -> Callable[..., None]:
    """Return a function that replaces a buffer with a tensor."""
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return lambda _old, _name, value: owner._buffers.__setitem__(last, value.detach())


def _caller(module: nn.Module, training: Sequence[bool]) -> Callable[..., Any]:
    """Return a function that calls `module` in the modes that it and its submodules had in the trace."""
    modes = list(zip(module.modules(), training, strict=False))

    def called(*args: Any, **kwargs: Any) -> Any:
        for part, mode in modes:
            if part.training is not mode:
                part.training = mode
        return module(*args, **kwargs)

    return called


def _wrapped(
    function: Callable[..., Any], rng: StageRNG, number: int | None, modes: TorchModes | None
) -> Callable[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if number is not None:
                stack.enter_context(rng.seeded_for(number))
            if modes is not None:
                stack.enter_context(modes.applied())
            return function(*args, **kwargs)

    return operation


class StagePrograms:
    """A cache of the programs of the stages `parts` of this process, by input shape and mode."""

    def __init__(
        self,
        problem: PartitionProblem,
        layout: StageLayout,
        parts: Mapping[int, StageModules],
        rng: Mapping[int, StageRNG],
    ) -> None:
        self._skeleton, self._device = problem.skeleton, problem.traced.device
        self._layout, self._parts, self._dice = layout, parts, rng
        self._made = {_key(problem.example, True): self._make(problem.traced)}
        self.of(problem.example, training=False)  # evaluation is checked before the first step

    def of(self, inputs: Any, training: bool) -> dict[int, StageProgram]:
        """Return the programs by stage, for a micro-batch shaped like `inputs`."""
        key = _key(inputs, training)
        if key not in self._made:
            self._made[key] = self._make(trace_micro_batch(self._skeleton, inputs, self._device, training))
        return self._made[key]

    def _make(self, traced: TracedModel) -> dict[int, StageProgram]:
        graphs = split(traced, stages_in(traced, self._layout), self._layout.num_stages)
        made = {}
        for stage, part in self._parts.items():
            for name in targets_of(graphs[stage].graph, traced.constants):
                if self._layout.stage_of_target(name) is None:  # a module without tensors, used only in evaluation
                    attach(part.root, name, copy.deepcopy(attribute(self._skeleton, name)), self._skeleton)
            made[stage] = compile_stage(graphs[stage], part.root, traced, self._dice[stage])
        return made


def _key(inputs: Any, training: bool) -> tuple[Any, ...]:
    return (training, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(inputs)))


def measured_seconds(
    problem: PartitionProblem, device: torch.device, loss: Callable[[Any], Tensor] | None = None
) -> list[float]:
    """Return the seconds of every part between two cut points, forward and backward, measured on `device`.

    Inputs are random. If a `loss` of the model's outputs is given, it is timed with the last part.
    """
    until, passes = time.perf_counter() + _MAX_SECONDS, list[list[float]]()
    while not passes or (len(passes) < _PASSES and time.perf_counter() < until):
        passes.append(list(_measured_once(problem, device, loss)))
    return [min(row) for row in zip(*passes, strict=True)]


def _measured_once(
    problem: PartitionProblem, device: torch.device, loss: Callable[[Any], Tensor] | None
) -> Iterator[float]:
    """Yield the seconds of every part, one after the other: all of them may not fit the device's memory together."""
    traced, spans, skeleton = problem.traced, problem.spans, on_meta(problem.skeleton)
    stages = [number for number, (begin, end) in enumerate(spans) for _ in range(begin, end)]
    parts = split(traced, stages, len(spans))
    for number, stage in enumerate(parts):
        root, _ = tree(skeleton, targets_of(stage.graph, traced.constants))
        give_memory(root, device, _fill)
        root.to(device)
        inputs = [_like(record(node).value, device) for node in stage.graph.nodes if node.op == "placeholder"]
        program = compile_stage(stage, root, traced, StageRNG(device))
        finish = loss if number == len(spans) - 1 else None
        yield min(_timed(program, inputs, device, finish) for _ in range(_ROUNDS))


def _fill(_path: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.uniform_(tensor, 0.01, 0.1) if tensor.is_floating_point() else tensor.zero_()


def _like(value: Tensor, device: torch.device) -> Tensor:
    """Return any numbers of the shape of `value`; integers are zero, so that indices are in range."""
    if not value.is_floating_point():
        return torch.zeros_like(value, device=device)
    return torch.rand_like(value, device=device).requires_grad_(value.requires_grad)


def _timed(
    program: StageProgram, inputs: Sequence[Tensor], device: torch.device, loss: Callable[[Any], Tensor] | None
) -> float:
    """Return the seconds of one forward and backward pass."""
    begin = _now(device)
    outputs = program.run(*inputs)
    made = [tensor for tensor in tensors_in(loss(outputs) if loss else outputs) if tensor.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return _now(device) - begin


def _now(device: torch.device) -> float:
    accelerators.synchronize(device)
    return time.perf_counter()
