"""The layout of a replica: the operations, modules and tensors of each stage, and the graph of each stage.

A stage receives each input once, directly from the stage that made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.nn.modules.batchnorm import _NormBase

from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.stage_modules import names_under, targets_of
from evener.records.errors import InvalidInput, InvalidValue
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import storage_of


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The assignment of a model's parts to a replica's stages. Tuples have an entry per stage.

    Attributes:
        ranks: Ranks of the stages, in order; within one process, numbers of its devices.
        operations: Stage of every operation of the trace that was cut, by name.
        targets: Names of the modules and tensors that a stage holds.
        parameters: First names of the parameters that a stage uses.
        buffers: First names of the buffers that a stage uses.
        norms: Names of the norms with running statistics.
    """

    ranks: tuple[int, ...]
    operations: Mapping[str, int]
    targets: tuple[tuple[str, ...], ...]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    norms: tuple[tuple[str, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages K."""
        return len(self.ranks)

    def first_operation(self, stage: int) -> str:
        """Return the name of the first operation of `stage`."""
        return next(name for name, home in self.operations.items() if home == stage)

    def stage_of_target(self, name: str) -> int | None:
        """Return the first stage that holds `name`; None if no stage does."""
        return next((stage for stage, held in enumerate(self.targets) if name in held), None)


def lay_out(model: PartitionProblem, positions: Sequence[int], ranks: Sequence[int]) -> StageLayout:
    """Return the layout of `model` cut in front of the operations at `positions`, with a stage on each of `ranks`.

    What only evaluation uses belongs to the stage that has its inputs then. What nothing uses belongs to the first
    stage.
    """
    traced, skeleton, num_stages = model.traced, model.skeleton, len(ranks)
    stages = [sum(position <= i for position in positions) for i in range(len(traced.operations))]
    used = [targets_of(stage.graph, traced.constants) for stage in split(traced, stages, num_stages)]
    layout = StageLayout(
        ranks=tuple(ranks),
        operations={node.name: stage for node, stage in zip(traced.operations, stages, strict=True)},
        targets=tuple(map(tuple, used)),
        parameters=tuple(tuple(names_under(skeleton.named_parameters(), skeleton, names)) for names in used),
        buffers=tuple(tuple(names_under(skeleton.named_buffers(), skeleton, names)) for names in used),
        norms=tuple(tuple(_norms_under(skeleton, names)) for names in used),
    )
    if not _unused(layout, skeleton):
        return layout
    later = model.evaluated()
    graphs = split(later, stages_in(later, layout), num_stages)
    layout = _with(layout, [targets_of(stage.graph, later.constants) for stage in graphs])
    return _with(layout, [_unused(layout, skeleton)] + [[]] * (num_stages - 1))


def stages_in(traced: TracedModel, layout: StageLayout) -> list[int]:
    """Return the stage of every operation of `traced`, which may have another shape or mode than the trace that was
    cut.

    If both traces are equal, the cut stays. Otherwise an operation runs where its modules and tensors are, or as early
    as its inputs allow. Raises InvalidInput if the model uses its modules in an order that the cut does not allow.
    """
    if [node.name for node in traced.operations] == list(layout.operations):
        return list(layout.operations.values())
    stages: dict[fx.Node, int] = {}
    for node in traced.operations:
        reads = [stages[value] for value in node.all_input_nodes if value in stages]
        held = [value for value in node.all_input_nodes if value.op == "get_attr"]
        held += [node] if node.op == "call_module" else []
        homes = [home for home in (layout.stage_of_target(str(one.target)) for one in held) if home is not None]
        stages[node] = max([*reads, *homes], default=0)
        if (homes and stages[node] > min(homes)) or _comes_changed(traced, node, stages):
            raise InvalidInput(
                f"the model runs {node.name}, in evaluation or for another input shape, in an order that its cut into "
                "stages does not allow"
            )
    return list(stages.values())


def positions_of(model: PartitionProblem, begins: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of the cuts in front of the modules (or operations) in `begins`.

    Raises InvalidValue for an unknown module, or if no cut is possible there; the error names the nearest cut points.
    """
    positions = [_position(model, name) for name in begins]
    if positions != sorted(set(positions)):
        raise InvalidValue("stages", list(begins), "names of modules in the order in which they run, each once")
    return tuple(positions)


def _position(model: PartitionProblem, name: str) -> int:
    operations, places = model.traced.operations, [place.position for place in model.cut_points]
    for position, node in enumerate(operations):
        path = str(node.target) if node.op == "call_module" else record(node).module
        if name in (node.name, path) or path.startswith(f"{name}."):
            if position in places:
                return position
            near = sorted(places, key=lambda place: abs(place - position))[:2]
            names = " and ".join(operations[place].name for place in sorted(near)) or "none"
            raise InvalidValue("stages", name, f"places where the model can be cut; the nearest are {names}")
    raise InvalidValue("stages", name, "names of modules that the model runs")


def _with(layout: StageLayout, more: Sequence[Sequence[str]]) -> StageLayout:
    """Add to `layout` those targets, in a row per stage, that no stage holds yet."""
    held = {name for names in layout.targets for name in names}
    rows = zip(layout.targets, more, strict=True)
    return replace(layout, targets=tuple((*names, *(name for name in new if name not in held)) for names, new in rows))


def _comes_changed(traced: TracedModel, node: fx.Node, stages: Mapping[fx.Node, int]) -> bool:
    """Return whether `node` reads a value of an earlier stage that this or a later stage changes in place."""
    for value in node.all_input_nodes:
        tensor = record(value).value
        if value in stages and stages[value] < stages[node] and isinstance(tensor, Tensor):
            changed = traced.changed.get(storage_of(tensor))
            if changed is not None and stages.get(changed, stages[node]) >= stages[node]:
                return True
    return False


def _norms_under(model: nn.Module, targets: Sequence[str]) -> list[str]:
    norms = [n for n, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    return [name for name in norms if _is_under(name, set(targets))]


def _unused(layout: StageLayout, model: nn.Module) -> list[str]:
    """Return parameters and buffers of `model` that no stage holds."""
    used = {name for names in layout.targets for name in names}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, _ in tensors if not _is_under(name, used)]


def _is_under(name: str, targets: Set[str]) -> bool:
    """Return whether `name` or a module around it is in `targets`."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in targets for i in range(1, len(parts) + 1))


@dataclass(frozen=True, kw_only=True)
class BoundaryTensor:
    """A tensor that is sent between stages.

    Attributes:
        name: Unique name in the model.
        shape: Shape for the traced number of samples.
        dtype: Dtype of the tensor and its gradient.
        needs_grad: Whether a gradient is sent back.
        made_by: Stage that makes it.
        used_by: Later stages that need it, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    made_by: int
    used_by: tuple[int, ...]

    def empty(self, device: torch.device) -> Tensor:
        """Return memory to receive the tensor or its gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """One stage's computation of a micro-batch.

    Attributes:
        graph: Maps `inputs` to `outputs`; the first stage takes the model's inputs, the last one gives the model's
            outputs.
        inputs: Values of earlier stages.
        outputs: Values for later stages.
        returns: On the last stage, the model's outputs with a node for every tensor.
    """

    graph: fx.Graph
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    returns: Any = None


def split(traced: TracedModel, stages: Sequence[int], num_stages: int) -> list[StageGraph]:
    """Return the graphs of all stages. Operation i belongs to `stages[i]`, which never precedes its inputs' stages."""
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
    nodes = [node for node in home if home[node] == stage]
    received = {n: values[n] for n in home if home[n] < stage and stage in values[n].used_by}
    inputs = [node for node in nodes if node.op == "placeholder"] if stage == 0 else list(received)
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
    made = [node for node in nodes if values[node].used_by]
    if stage == last:
        hold_attributes(traced.output)
        graph.output(map_aggregate(traced.output.args[0], copied))
    else:
        graph.output(tuple(copies[node] for node in made))
    return StageGraph(
        graph=graph,
        inputs=tuple(received.values()),
        outputs=tuple(values[node] for node in made),
        returns=traced.outputs if stage == last else None,
    )
