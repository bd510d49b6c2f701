"""What a model does, as a graph of operations: the one representation that everything about a model is derived from.

    node.op               placeholder (an input), get_attr (a tensor that the model holds, or a constant), call_module,
                          call_function, call_method, output
    node.target, .args    as torch.fx writes them, with a node in place of every tensor
    record(node)          what was seen when it ran: a OpRecord

A module that is not looked into is one operation; a call of torch outside of such modules is another. The graph holds
for one shape of the inputs and one mode, training or evaluation: both may decide what a model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, kw_only=True)
class TorchModes:
    """What a model sets around some of its operations: state of this thread that decides how they run.

    Attributes:
        device_type: that autocast is asked about.
        grad: whether gradients are recorded.
        autocast: its dtype; None if it is off.
    """

    device_type: str
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> TorchModes:
        """As it is in this thread."""
        on = torch.is_autocast_enabled(device_type)
        return cls(
            device_type=device_type,
            grad=torch.is_grad_enabled(),
            autocast=torch.get_autocast_dtype(device_type) if on else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, this thread is in this state; gradients stay off where they are off already."""
        cast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with cast, torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            yield


@dataclass(kw_only=True, slots=True)
class OpRecord:
    """What was seen when a node ran.

    Attributes:
        value: what it returned, on the meta device.
        number: its own, unique in the graph.
        module: path of the module that it was in; empty for the model itself.
        line: file and line of the user's code that it comes from; empty if that is a library's.
        modes: set around it by the model; None if there are none.
        is_random: whether it drew random numbers.
        training: of a module that is one operation, the mode of it and of each module inside when it was called.
        changes: nodes whose values it changed in place.
        flops: of the forward pass, for all samples that were traced.
        kept: bytes of every storage that autograd keeps for backward here and nowhere before.
    """

    value: Any
    number: int
    module: str
    line: str = ""
    modes: TorchModes | None = None
    is_random: bool = False
    training: tuple[bool, ...] = ()
    changes: tuple[fx.Node, ...] = ()
    flops: int = 0
    kept: tuple[int, ...] = ()


def record(node: fx.Node) -> OpRecord:
    """What was seen when `node` ran."""
    found: OpRecord = node.meta["record"]
    return found


def item(values: Any, key: Any) -> Any:
    """One of several values that an operation returned: the target of a node of its own."""
    return values[key]


def assign(_held: Tensor, _name: str, _value: Tensor) -> None:
    """From now on the model holds another tensor under the name of a buffer: the target of a node of its own."""
    raise NotImplementedError("whoever runs the graph knows where the buffer is")


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model's operations, in order.

    Attributes:
        graph: of torch.fx, with a OpRecord for every node but the output.
        device: that stands in the graph for the one that the model will run on.
        constants: tensors with numbers that are no attributes of the model, by the name that the graph gives them.
        changed: the last node that changed a storage in place, by storage.
        outputs: what the model returns, with a node for every tensor.
        states: names of what the pass changed: buffers and parameters, but not BatchNorm's running statistics, and
            attributes that a module that is one operation changes itself.
        whole: modules with children that could not be looked into, with the reason.
    """

    graph: fx.Graph
    device: torch.device
    constants: Mapping[str, Tensor]
    changed: Mapping[int, fx.Node]
    outputs: Any
    states: tuple[str, ...]
    whole: Mapping[str, str]

    @property
    def operations(self) -> list[fx.Node]:
        """Nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op.startswith("call")]

    @property
    def output(self) -> fx.Node:
        """The node of what the model returns."""
        node: fx.Node = next(iter(reversed(self.graph.nodes)))
        return node
