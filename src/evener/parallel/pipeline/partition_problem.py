"""A model that is to be cut: what it does, where it may be cut, what its operations take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from evener.errors import InvalidInput
from evener.parallel.pipeline.partition import CutPoint, cut_points, last_use
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import attribute
from evener.tracer.nested import tensors_in
from evener.tracer.tracing import NotTraceable, trace

WEIGHT_COPIES = 4
"""Of every trained parameter: itself, its gradient and two of the optimiser's."""
LOSS_COPIES = 3
"""Of what the model returns, while the loss is computed: log-probabilities, their gradient and that of the outputs."""


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """What one operation takes, for the traced number of samples.

    Attributes:
        flops: of the forward pass.
        moved_bytes: read and written.
        kept_bytes: that backward needs and no operation before has kept.
        weight_bytes: of trained parameters that no operation before has used.
        gradient_bytes: of gradients that are there while its backward pass runs: of what it makes, what it reads, and
            what passes it by.
    """

    flops: float
    moved_bytes: int
    kept_bytes: int
    weight_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """A model, followed with one micro-batch.

    Attributes:
        skeleton: the model without memory.
        example: a micro-batch without memory.
        traced: in training.
        cut_points: where it may be cut, in order.
        costs: of every operation.
    """

    skeleton: nn.Module
    example: Any
    traced: TracedModel
    cut_points: Sequence[CutPoint]
    costs: Sequence[OperationCost]

    @property
    def ends(self) -> list[int]:
        """Number of operations in front of every cut point, and of all."""
        return [point.position for point in self.cut_points] + [len(self.costs)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Operations between neighbouring cut points: from, to."""
        return list(pairwise([0, *self.ends]))

    def evaluated(self) -> TracedModel:
        """What the model does in evaluation."""
        return trace_micro_batch(self.skeleton, self.example, self.traced.device, training=False)

    def weight_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): weights, gradients, the optimiser's state."""
        return WEIGHT_COPIES * sum(one.weight_bytes for one in self.costs[begin:end])

    def kept_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): what backward needs of one micro-batch."""
        return sum(one.kept_bytes for one in self.costs[begin:end])

    def passing_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): the most that is there besides for a moment: gradients, what the loss makes."""
        loss = LOSS_COPIES * self._output_bytes() if end == len(self.costs) else 0
        return max([loss, *(one.gradient_bytes + one.weight_bytes for one in self.costs[begin:end])])

    def _output_bytes(self) -> int:
        nodes = self.traced.output.all_input_nodes
        return sum(tensor.nbytes for node in nodes for tensor in tensors_in(record(node).value))

    def boundary_bytes(self, position: int) -> int:
        """That live across the cut in front of the operation at `position`."""
        return next((point.nbytes for point in self.cut_points if point.position == position), 0)


def partition_problem(skeleton: nn.Module, example: Any, device: torch.device) -> PartitionProblem:
    """The model `skeleton`, followed in training with the micro-batch `example`."""
    traced = trace_micro_batch(skeleton, example, device)
    return PartitionProblem(
        skeleton=skeleton,
        example=example,
        traced=traced,
        cut_points=cut_points(traced, skeleton),
        costs=operation_costs(traced, skeleton),
    )


def trace_micro_batch(model: nn.Module, inputs: Any, device: torch.device, training: bool = True) -> TracedModel:
    """What `model` does with a micro-batch like `inputs`.

    Raises:
        InvalidInput: names the line of the model that cannot be followed.
    """
    try:
        return trace(model, inputs, device, training)
    except NotTraceable as error:
        raise InvalidInput(f"the model cannot be cut into stages, because of {error}") from error.__cause__


def operation_costs(traced: TracedModel, model: nn.Module) -> list[OperationCost]:
    """What every operation of the traced `model` takes."""
    gradient_bytes = _gradient_bytes(traced)
    found, used = [], set[int]()
    for node in traced.operations:
        given = [record(one).value for one in node.all_input_nodes]
        cost = OperationCost(
            flops=record(node).flops,
            moved_bytes=sum(tensor.nbytes for tensor in tensors_in((given, record(node).value))),
            kept_bytes=sum(record(node).kept),
            weight_bytes=_new_weights(node, traced, model, used),
            gradient_bytes=gradient_bytes[node],
        )
        found.append(cost)
    return found


def _new_weights(node: fx.Node, traced: TracedModel, model: nn.Module, used: set[int]) -> int:
    """Bytes of the trained parameters that `node` uses and that are not yet in `used`, where they are added."""
    owners = list(model.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    names = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    held = [attribute(model, name) for name in names if name not in traced.constants]
    owners += [tensor for tensor in held if isinstance(tensor, nn.Parameter)]
    new = {id(p): p for p in owners if p.requires_grad and id(p) not in used}
    used |= set(new)
    return sum(parameter.nbytes for parameter in new.values())


def _gradient_bytes(traced: TracedModel) -> dict[fx.Node, int]:
    """By operation; the gradient of a value is there from the backward pass of its last user to that of its maker."""
    operations = traced.operations
    index = {node: i for i, node in enumerate(operations)}
    found = dict.fromkeys(operations, 0)
    for maker in operations:
        nbytes = sum(tensor.nbytes for tensor in tensors_in(record(maker).value) if tensor.requires_grad)
        for node in operations[index[maker] : last_use(maker, index) + 1]:
            found[node] += nbytes
    return found
