"""A stage's graph made to run: its code, with the stage's own modules, seeds for what is random, modes kept.

Programs are made when a shape or mode first comes up, and kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from evener.parallel.pipeline.partition import BoundaryTensor, StageGraph, split
from evener.parallel.pipeline.partition_problem import PartitionProblem, trace_micro_batch
from evener.parallel.pipeline.rng import StageRNG
from evener.parallel.pipeline.stage_layout import StageLayout, stages_in
from evener.parallel.pipeline.stage_modules import StageModules, attach, targets_of
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import attribute
from evener.tracer.nested import tensors_in
from evener.tracer.torch_modes import TorchModes


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """What one stage does with a micro-batch of one shape.

    Attributes:
        run: from `inputs` (the first stage: from the model's inputs) to a tuple of `outputs` (the last stage: to what
            the model returns).
        inputs: values of earlier stages.
        outputs: values for later ones.
    """

    run: Callable[..., Any]
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]


def compile_stage(stage: StageGraph, root: nn.Module, traced: TracedModel, rng: StageRNG) -> StageProgram:
    """The program of `stage` with the modules in `root`.

    Args:
        stage: its graph; it is changed.
        root: what the stage holds.
        traced: that the stage is a part of.
        rng: for random operations; also says which device is the stage's.
    """
    for node in stage.graph.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: rng.device if value == traced.device else value
        )
        if node.op == "get_attr" and node.target in traced.constants:
            node.target, node.op = _constant(traced.constants[node.target].to(rng.device)), "call_function"
            continue
        if node.op.startswith("call") and (record(node).is_random or record(node).modes is not None):
            number = record(node).number if record(node).is_random else None
            function = _wrapped(_function_of(node, root), rng, number, record(node).modes)
            node.target, node.op = function, "call_function"
    return StageProgram(run=fx.GraphModule(root, stage.graph), inputs=stage.inputs, outputs=stage.outputs)


def _function_of(node: fx.Node, root: nn.Module) -> Callable[..., Any]:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    def constant() -> Tensor:
        return tensor

    return constant


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
    """Programs by shape of the inputs and mode.

    Args:
        problem: whose model was cut.
        layout: its stages.
        parts: what the stages of this process hold.
        rng: likewise.
    """

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

    def of(self, inputs: Any, training: bool) -> dict[int, StageProgram]:
        """By stage, for a micro-batch shaped like `inputs`."""
        key = _key(inputs, training)
        if key not in self._made:
            self._made[key] = self._make(trace_micro_batch(self._skeleton, inputs, self._device, training))
        return self._made[key]

    def _make(self, traced: TracedModel) -> dict[int, StageProgram]:
        graphs = split(traced, stages_in(traced, self._layout), self._layout.num_stages)
        made = {}
        for stage, part in self._parts.items():
            for name in targets_of(graphs[stage].graph, traced.constants):
                if self._layout.stage_of_target(name) is None:  # a module without tensors that training does not use
                    attach(part.root, name, copy.deepcopy(attribute(self._skeleton, name)), self._skeleton)
            made[stage] = compile_stage(graphs[stage], part.root, traced, self._dice[stage])
        return made


def _key(inputs: Any, training: bool) -> tuple[Any, ...]:
    return (training, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(inputs)))
