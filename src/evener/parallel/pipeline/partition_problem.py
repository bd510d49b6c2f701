"""A model that will be cut: its trace, its cut points, and the costs of its operations.

    operation 0 | operation 1 | operation 2 ...         position p is in front of operation p
       values made before p and used from p on are live at p

A model cannot be cut at a position where a live value is changed in place later, or where several outputs of one
operation are not yet unpacked. It also cannot be cut between two uses of one state that a pass changes, such as a
counter or the statistics of a BatchNorm: these have to stay on one device.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from evener.parallel.op_registry import NORMS
from evener.parallel.refusals import untraceable
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import META, attribute, on_meta, storage_of
from evener.tracer.nested import call, tensors_in
from evener.tracer.tracing import trace

WEIGHT_COPIES = 4
"""Copies of every trained parameter: itself, its gradient and two of the optimizer's."""
LOSS_COPIES = 3
"""Copies of the outputs while the loss is computed: log-probabilities, their gradient, the outputs' gradient."""


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A position at which a model may be cut.

    Attributes:
        position: Number of operations in front of it.
        nbytes: Bytes of all live values, for the traced number of samples.
    """

    position: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """The costs of one operation, for the traced number of samples.

    Attributes:
        flops: Floating-point operations of the forward pass.
        moved_bytes: Bytes read and written.
        kept_bytes: Bytes that backward needs and no earlier operation has kept.
        weight_bytes: Bytes of trained parameters that no earlier operation has used.
        gradient_bytes: Bytes of all gradients that exist during its backward pass: of its outputs, its inputs, and
            other live values.
    """

    flops: float
    moved_bytes: int
    kept_bytes: int
    weight_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """A model, traced with one micro-batch.

    Attributes:
        skeleton: The model on the meta device.
        example: A micro-batch on the meta device.
        traced: The trace in training mode.
        cut_points: Positions at which the model may be cut, in order.
        costs: Costs of every operation.
    """

    skeleton: nn.Module
    example: Any
    traced: TracedModel
    cut_points: Sequence[CutPoint]
    costs: Sequence[OperationCost]

    @property
    def ends(self) -> list[int]:
        """Number of operations in front of every cut point, and of all operations."""
        return [point.position for point in self.cut_points] + [len(self.costs)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Operations between neighbouring cut points, as (begin, end)."""
        return list(pairwise([0, *self.ends]))

    def evaluated(self) -> TracedModel:
        """Trace the model in evaluation mode."""
        return trace_micro_batch(self.skeleton, self.example, self.traced.device, training=False)

    def moved_buffers(self) -> list[str]:
        """Return names of buffers that every micro-batch changes, and that are not deferred to the end of the step."""
        norms = [path for path, module in self.skeleton.named_modules() if isinstance(module, _NormBase)]
        seen = _RunningStatistics()
        twin, rng_state = on_meta(self.skeleton).train(), random.getstate()
        with torch.random.fork_rng([]), META, seen:
            call(twin, self.example)
        random.setstate(rng_state)
        named = [(name, id(buffer)) for name, buffer in twin.named_buffers()]
        names = [*self.traced.states, *(name for name, key in named if key in seen.found)]
        return [name for name in names if name.rpartition(".")[0] not in norms]

    def weight_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of weights, gradients and optimizer state of operations [begin, end)."""
        return WEIGHT_COPIES * sum(one.weight_bytes for one in self.costs[begin:end])

    def kept_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of one micro-batch that backward of operations [begin, end) needs."""
        return sum(one.kept_bytes for one in self.costs[begin:end])

    def passing_bytes(self, begin: int, end: int) -> int:
        """Return the largest number of other bytes that operations [begin, end) need: gradients, and the loss."""
        loss = LOSS_COPIES * self._output_bytes() if end == len(self.costs) else 0
        return max([loss, *(one.gradient_bytes + one.weight_bytes for one in self.costs[begin:end])])

    def _output_bytes(self) -> int:
        nodes = self.traced.output.all_input_nodes
        return sum(tensor.nbytes for node in nodes for tensor in tensors_in(record(node).value))

    def boundary_bytes(self, position: int) -> int:
        """Return the bytes of the live values in front of the operation at `position`."""
        return next((point.nbytes for point in self.cut_points if point.position == position), 0)


class _RunningStatistics(TorchFunctionMode):
    """Records the running statistics that functional norms move.

    Attributes:
        found: Ids of the running statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and record its running statistics if it is a norm."""
        if func in NORMS:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            named = bound.arguments
            if named["training" if func is F.batch_norm else "use_input_stats"]:
                self.found |= {id(named["running_mean"]), id(named["running_var"])}
        return func(*args, **(kwargs or {}))


def partition_problem(skeleton: nn.Module, example: Any, device: torch.device) -> PartitionProblem:
    """Trace the model `skeleton` in training mode with the micro-batch `example`."""
    traced = trace_micro_batch(skeleton, example, device)
    return PartitionProblem(
        skeleton=skeleton,
        example=example,
        traced=traced,
        cut_points=cut_points(traced, skeleton),
        costs=operation_costs(traced, skeleton),
    )


def trace_micro_batch(model: nn.Module, inputs: Any, device: torch.device, training: bool = True) -> TracedModel:
    """Trace `model` with a micro-batch like `inputs`.

    Raises:
        InvalidInput: The model cannot be traced; the error names the line.
    """
    with untraceable("the model cannot be cut into stages"):
        return trace(model, inputs, device, training)


def cut_points(traced: TracedModel, model: nn.Module) -> list[CutPoint]:
    """Return all positions at which the traced `model` may be cut, in order."""
    operations = traced.operations
    index = {node: i for i, node in enumerate(operations)}
    forbidden = _inseparable(traced, model, index)
    ends = {node: last_use(node, index) for node in traced.graph.nodes if node.op not in ("get_attr", "output")}
    live = [node for node in ends if node.op == "placeholder"]
    points = []
    for position in range(1, len(operations)):
        live = [node for node in (*live, operations[position - 1]) if ends[node] >= position]
        if not forbidden[position] and all(_may_cross(node, position, traced, index) for node in live):
            points.append(CutPoint(position=position, nbytes=sum(record(node).value.nbytes for node in live)))
    return points


def last_use(node: fx.Node, index: dict[fx.Node, int]) -> int:
    """Return the index of the last operation that uses the value. The outputs are used after all operations."""
    return max((index.get(user, len(index)) for user in node.users), default=-1)


def _may_cross(node: fx.Node, position: int, traced: TracedModel, index: dict[fx.Node, int]) -> bool:
    value = record(node).value
    if not isinstance(value, Tensor):
        return False
    changed = traced.changed.get(storage_of(value))
    return changed is None or index[changed] < position


def _inseparable(traced: TracedModel, model: nn.Module, index: dict[fx.Node, int]) -> list[bool]:
    """Return for every position whether it lies between two uses of a state that a pass changes."""
    uses: dict[int, list[int]] = {}
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    states = {id(norm) for norm in norms} | {id(changed_by(model, name)) for name in traced.states}
    for node in traced.graph.nodes:
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            for part in (*module.modules(), *module.buffers(), *module.parameters()):
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


def changed_by(model: nn.Module, name: str) -> Any:
    """Return what a pass changes under `name`, one of the states: a tensor, or the module with the attribute."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    held = getattr(owner, last, None)
    return held if isinstance(held, Tensor) else owner


def operation_costs(traced: TracedModel, model: nn.Module) -> list[OperationCost]:
    """Return the costs of every operation of the traced `model`."""
    gradient_bytes = _gradient_bytes(traced)
    costs, used = [], set[int]()
    for node in traced.operations:
        inputs = [record(one).value for one in node.all_input_nodes]
        cost = OperationCost(
            flops=record(node).flops,
            moved_bytes=sum(tensor.nbytes for tensor in tensors_in((inputs, record(node).value))),
            kept_bytes=sum(record(node).kept_sizes),
            weight_bytes=_new_weights(node, traced, model, used),
            gradient_bytes=gradient_bytes[node],
        )
        costs.append(cost)
    return costs


def _new_weights(node: fx.Node, traced: TracedModel, model: nn.Module, used: set[int]) -> int:
    """Return the bytes of trained parameters that `node` uses and `used` lacks; add them to `used`."""
    owners = list(model.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    names = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    held = [attribute(model, name) for name in names if name not in traced.constants]
    owners += [tensor for tensor in held if isinstance(tensor, nn.Parameter)]
    new = {id(p): p for p in owners if p.requires_grad and id(p) not in used}
    used |= set(new)
    return sum(parameter.nbytes for parameter in new.values())


def _gradient_bytes(traced: TracedModel) -> dict[fx.Node, int]:
    """Return bytes by operation; a gradient exists from its value's last user to its maker."""
    operations = traced.operations
    index = {node: i for i, node in enumerate(operations)}
    gradient_bytes = dict.fromkeys(operations, 0)
    for maker in operations:
        nbytes = sum(tensor.nbytes for tensor in tensors_in(record(maker).value) if tensor.requires_grad)
        for node in operations[index[maker] : last_use(maker, index) + 1]:
            gradient_bytes[node] += nbytes
    return gradient_bytes
