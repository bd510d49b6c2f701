"""What a rank's part of one operation is made of: the operation, how the plan does it, and where this rank is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from evener.oracle.division.layout import Layout, Region, Shape, length
from evener.oracle.division.network import Operation
from evener.oracle.division.plan import OperationPlan
from evener.parallel.box_ops import Box, held_by
from evener.parallel.op_call import At, Call, OpGraph, filled
from evener.parallel.process_mesh import ProcessMesh

LocalOp: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""From this rank's inputs, in the layouts that the plan says, to its output."""


@dataclass(frozen=True)
class OpContext:
    """What a local operation is made of.

    Attributes:
        graph: of the model.
        index: of the operation to be done.
        step: how the plan does it.
        model: this rank's part of the model.
        mesh: where this rank is.
        samples: (first one of this replica, its number, that of all replicas) of the batch that is being computed.
    """

    graph: OpGraph
    index: int
    step: OperationPlan
    model: nn.Module
    mesh: ProcessMesh
    samples: Callable[[], tuple[int, int, int]]

    @property
    def operation(self) -> Operation:
        """To be done."""
        return self.graph.network.operations[self.index]

    @property
    def inputs(self) -> tuple[Operation, ...]:
        """Operations whose outputs it reads."""
        return tuple(self.graph.network.operations[i] for i in self.operation.inputs)

    @property
    def call(self) -> Call:
        """What computes it in one process."""
        return self.graph.calls[self.index]

    @property
    def rank(self) -> int:
        """Of this process in its replica."""
        return self.mesh.group.rank

    @property
    def region(self) -> Region:
        """What this rank has of the output."""
        return self.step.choice.gives.region(self.rank, self.operation.shape)

    @property
    def shape(self) -> Shape:
        """Of this rank's output."""
        return tuple(length(intervals) for intervals in self.region)

    @property
    def layer(self) -> Any:
        """This rank's part of the module that computes the operation."""
        return self.resolved(self.call.function)

    def resolved(self, function: Any) -> Any:
        """The function itself, or the module of this rank's part of the model that it stands for."""
        return self.model.get_submodule(function.path) if isinstance(function, At) else function

    def computing(self, call: Call) -> LocalOp:
        """What `call` computes, which gives this operation or the same of other samples."""
        function, arguments = self.resolved(call.function), (call.args, call.kwargs)

        def compute(inputs: Sequence[Tensor]) -> Tensor:
            args, kwargs = filled(arguments, iter(inputs))
            result: Tensor = function(*args, **kwargs)
            return result

        return compute

    def boxes(self, reach: Layout) -> tuple[Box, Box]:
        """What this rank has of the input, when it comes in layout `reach`, and what of the output."""
        own = held_by(self.step.choice.gives, self.rank, self.operation.shape)
        return held_by(reach, self.rank, self.inputs[0].shape), own
