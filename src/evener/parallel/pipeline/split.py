"""A traced model, divided into consecutive stages: what each one computes, what it is given and by whom.

Whatever a stage needs comes straight from the stage that made it, also past stages in between, and only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_aggregate

from evener.parallel.pipeline.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Value:
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
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def split(trace: Trace, stages: Sequence[int], num_stages: int) -> list[StageGraph]:
    """The graphs of all stages; operation i belongs to stage `stages[i]`, never to one before those of its inputs."""
    home = dict(zip(trace.operations, stages, strict=True))
    home |= {node: 0 for node in trace.graph.nodes if node.op == "placeholder"}
    values = {node: _value(node, home, num_stages - 1) for node in home}
    return [_stage_graph(trace, stage, num_stages - 1, home, values) for stage in range(num_stages)]


def _value(node: fx.Node, home: dict[fx.Node, int], last: int) -> Value:
    users = {home.get(user, last) for user in node.users}
    tensor = node.meta["value"]
    is_tensor = isinstance(tensor, Tensor)
    return Value(
        name=node.name,
        shape=tuple(tensor.shape) if is_tensor else (),
        dtype=tensor.dtype if is_tensor else torch.float32,
        needs_grad=is_tensor and tensor.requires_grad,
        made_by=home[node],
        used_by=tuple(sorted(user for user in users if user > home[node])),
    )


def _stage_graph(
    trace: Trace, stage: int, last: int, home: dict[fx.Node, int], values: dict[fx.Node, Value]
) -> StageGraph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    own = [node for node in home if home[node] == stage]
    given = {n: values[n] for n in home if home[n] < stage and stage in values[n].used_by}
    inputs = [node for node in own if node.op == "placeholder"] if stage == 0 else list(given)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)

    def copied(value: Argument) -> Argument:
        return copies[value] if isinstance(value, fx.Node) else value

    for node in trace.operations:
        if home[node] != stage:
            continue
        for attribute in node.all_input_nodes:
            if attribute.op == "get_attr" and attribute not in copies:
                copies[attribute] = graph.get_attr(str(attribute.target))
        arguments = (map_aggregate(node.args, copied), map_aggregate(node.kwargs, copied))
        copies[node] = graph.create_node(node.op, node.target, *arguments, name=node.name)
        copies[node].meta.update(node.meta)
    made = [node for node in own if values[node].used_by]
    if stage == last:
        output = next(iter(reversed(trace.graph.nodes)))
        for attribute in output.all_input_nodes:
            if attribute.op == "get_attr" and attribute not in copies:
                copies[attribute] = graph.get_attr(str(attribute.target))
        graph.output(map_aggregate(output.args[0], copied))
    else:
        graph.output(tuple(copies[node] for node in made))
    return StageGraph(graph=graph, inputs=tuple(given.values()), outputs=tuple(values[node] for node in made))
