"""Where a model may be cut, what would travel there, and what every stage of a cut computes.

    operation 0 | operation 1 | operation 2 ...         position p is in front of operation p
       values that are made before p and used from p on live across it

A position is no cut where a value lives across that is changed in place behind it, where several outputs of one
operation have not been told apart yet, and between two uses of one thing that a pass changes (a counter, the statistics
of a BatchNorm): those have to happen on one device.

Whatever a stage needs comes straight from the stage that made it, also past stages in between, and only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.nn.modules.batchnorm import _BatchNorm

from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import attribute, storage_of


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A place where a model may be cut.

    Attributes:
        position: number of operations in front of it.
        nbytes: of all values that live across it, for the traced number of samples.
    """

    position: int
    nbytes: int


def cut_points(traced: TracedModel, model: nn.Module) -> list[CutPoint]:
    """All places where the traced `model` may be cut, in order."""
    operations = traced.operations
    index = {node: i for i, node in enumerate(operations)}
    forbidden = _inseparable(traced, model, index)
    ends = {node: last_use(node, index) for node in traced.graph.nodes if node.op not in ("get_attr", "output")}
    live = [node for node in ends if node.op == "placeholder"]
    found = []
    for position in range(1, len(operations)):
        live = [node for node in (*live, operations[position - 1]) if ends[node] >= position]
        if not forbidden[position] and all(_may_cross(node, position, traced, index) for node in live):
            found.append(CutPoint(position=position, nbytes=sum(record(node).value.nbytes for node in live)))
    return found


def last_use(node: fx.Node, index: dict[fx.Node, int]) -> int:
    """Index of the last operation that uses the value; the model's outputs are used behind all operations."""
    return max((index.get(user, len(index)) for user in node.users), default=-1)


def _may_cross(node: fx.Node, position: int, traced: TracedModel, index: dict[fx.Node, int]) -> bool:
    value = record(node).value
    if not isinstance(value, Tensor):
        return False
    changed = traced.changed.get(storage_of(value))
    return changed is None or index[changed] < position


def _inseparable(traced: TracedModel, model: nn.Module, index: dict[fx.Node, int]) -> list[bool]:
    """For every position, whether it lies between two uses of one thing that a pass changes."""
    uses: dict[int, list[int]] = {}
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    states = {id(norm) for norm in norms} | {id(model.get_buffer(name)) for name in traced.states}
    for node in traced.graph.nodes:
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            for part in (*module.modules(), *module.buffers()):
                if id(part) in states:
                    uses.setdefault(id(part), []).append(index[node])
        elif node.op == "get_attr":
            held = None if node.target in traced.constants else attribute(model, node.target)
            uses.setdefault(id(held), []).extend(index[user] for user in node.users)
    forbidden = [False] * len(index)
    for key, places in uses.items():
        if key in states:
            for position in range(min(places) + 1, max(places) + 1):
                forbidden[position] = True
    return forbidden


@dataclass(frozen=True, kw_only=True)
class BoundaryTensor:
    """A tensor that travels between stages.

    Attributes:
        name: unique in the model.
        shape: with the number of samples for which the model was traced.
        dtype: of it and of its gradient.
        needs_grad: whether a gradient travels back.
        made_by: stage that it comes from.
        used_by: later stages that need it, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    made_by: int
    used_by: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of it, and of its gradient."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive it, or its gradient, in."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """What one stage does with a micro-batch.

    Attributes:
        graph: takes `inputs`, the first stage the model's inputs instead; gives `outputs`, and the last stage what
            the model returns.
        inputs: values of earlier stages.
        outputs: values for later stages; the last stage has none.
    """

    graph: fx.Graph
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]


def split(traced: TracedModel, stages: Sequence[int], num_stages: int) -> list[StageGraph]:
    """The graphs of all stages; operation i belongs to stage `stages[i]`, never to one before those of its inputs."""
    home = dict(zip(traced.operations, stages, strict=True))
    home |= {node: 0 for node in traced.graph.nodes if node.op == "placeholder"}
    values = {node: _value(node, home, num_stages - 1) for node in home}
    return [_stage_graph(traced, stage, num_stages - 1, home, values) for stage in range(num_stages)]


def _value(node: fx.Node, home: dict[fx.Node, int], last: int) -> BoundaryTensor:
    users = {home.get(user, last) for user in node.users}
    tensor = record(node).value
    is_tensor = isinstance(tensor, Tensor)
    return BoundaryTensor(
        name=node.name,
        shape=tuple(tensor.shape) if is_tensor else (),
        dtype=tensor.dtype if is_tensor else torch.float32,
        needs_grad=is_tensor and tensor.requires_grad,
        made_by=home[node],
        used_by=tuple(sorted(user for user in users if user > home[node])),
    )


def _stage_graph(
    traced: TracedModel, stage: int, last: int, home: dict[fx.Node, int], values: dict[fx.Node, BoundaryTensor]
) -> StageGraph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    own = [node for node in home if home[node] == stage]
    given = {n: values[n] for n in home if home[n] < stage and stage in values[n].used_by}
    inputs = [node for node in own if node.op == "placeholder"] if stage == 0 else list(given)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)

    def hold_attributes(user: fx.Node) -> None:
        for node in user.all_input_nodes:
            if node.op == "get_attr" and node not in copies:
                copies[node] = graph.get_attr(str(node.target))

    def copied(value: Argument) -> Argument:
        return copies[value] if isinstance(value, fx.Node) else value

    for node in traced.operations:
        if home[node] != stage:
            continue
        hold_attributes(node)
        arguments = (map_aggregate(node.args, copied), map_aggregate(node.kwargs, copied))
        copies[node] = graph.create_node(node.op, node.target, *arguments, name=node.name)
        copies[node].meta.update(node.meta)
    made = [node for node in own if values[node].used_by]
    if stage == last:
        hold_attributes(traced.output)
        graph.output(map_aggregate(traced.output.args[0], copied))
    else:
        graph.output(tuple(copies[node] for node in made))
    return StageGraph(graph=graph, inputs=tuple(given.values()), outputs=tuple(values[node] for node in made))
