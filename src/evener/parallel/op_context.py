"""The context of a rank's part of one operation: the operation, its plan, and the position of this rank."""

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
"""Maps this rank's inputs, in the layouts of the plan, to its output."""


@dataclass(frozen=True)
class OpContext:
    """The context of a local operation.

    Attributes:
        graph: The model's operations.
        index: Index of the operation.
        step: The plan of the operation.
        model: This rank's part of the model.
        mesh: The position of this rank.
        samples: Returns, for the current batch: first sample of this replica, its number of samples, number of all
            samples.
    """

    graph: OpGraph
    index: int
    step: OperationPlan
    model: nn.Module
    mesh: ProcessMesh
    samples: Callable[[], tuple[int, int, int]]

    @property
    def operation(self) -> Operation:
        """The operation."""
        return self.graph.network.operations[self.index]

    @property
    def inputs(self) -> tuple[Operation, ...]:
        """The operations whose outputs it reads."""
        return tuple(self.graph.network.operations[i] for i in self.operation.inputs)

    @property
    def call(self) -> Call:
        """Its computation in a single process."""
        return self.graph.calls[self.index]

    @property
    def rank(self) -> int:
        """Rank of this process in its replica."""
        return self.mesh.group.rank

    @property
    def region(self) -> Region:
        """This rank's region of the output."""
        return self.step.choice.gives.region(self.rank, self.operation.shape)

    @property
    def shape(self) -> Shape:
        """Shape of this rank's output."""
        return tuple(length(intervals) for intervals in self.region)

    @property
    def layer(self) -> Any:
        """This rank's part of the module that computes the operation."""
        return self.resolved(self.call.function)

    def resolved(self, function: Any) -> Any:
        """Return the function itself, or the module of this rank's part of the model that it stands for."""
        return self.model.get_submodule(function.path) if isinstance(function, At) else function

    def computing(self, call: Call) -> LocalOp:
        """Return the function of `call`, which computes this operation, perhaps for other samples."""
        function, arguments = self.resolved(call.function), (call.args, call.kwargs)

        def compute(inputs: Sequence[Tensor]) -> Tensor:
            args, kwargs = filled(arguments, iter(inputs))
            result: Tensor = function(*args, **kwargs)
            return result

        return compute

    def boxes(self, reach: Layout) -> tuple[Box, Box]:
        """Return this rank's boxes of the input, in layout `reach`, and of the output."""
        outputs = held_by(self.step.choice.gives, self.rank, self.operation.shape)
        return held_by(reach, self.rank, self.inputs[0].shape), outputs
