"""The graph of a model's operations, from which everything about a model is derived.

    node.op               placeholder (an input), get_attr (a tensor that the model holds, or a constant), call_module,
                          call_function, call_method, output
    node.target, .args    as in torch.fx, with a node in place of every tensor
    record(node)          the OpRecord of the node's run

A leaf module is one operation, and so is a call of torch outside of leaf modules. The graph is valid for one shape of
the inputs and one mode, training or evaluation, because both may change what a model does.
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
    """The modes that a model sets around some of its operations: state of this thread.

    Attributes:
        device_type: Device type of autocast.
        grad: Whether gradients are recorded.
        autocast: Dtype of autocast; None if it is off.
    """

    device_type: str
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> TorchModes:
        """Return the current modes of this thread."""
        on = torch.is_autocast_enabled(device_type)
        return cls(
            device_type=device_type,
            grad=torch.is_grad_enabled(),
            autocast=torch.get_autocast_dtype(device_type) if on else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set these modes in this thread; gradients stay off if they are off already."""
        cast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with cast, torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            yield


@dataclass(kw_only=True, slots=True)
class OpRecord:
    """The record of a run of a node.

    Attributes:
        value: Its result, on the meta device.
        number: Its unique number in the graph.
        module: Path of the module that ran it; empty for the model itself.
        line: File and line of the user's code; empty if the call is in a library.
        modes: Modes that the model set around it; None if there are none.
        is_random: Whether it drew random numbers.
        training: Modes of a module that is one operation, and of its submodules, at the call.
        changes: Nodes whose values it changed in place.
        flops: Floating-point operations of the forward pass, for all traced samples.
        kept_sizes: Bytes of every storage that autograd keeps for backward here and nowhere before.
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
    kept_sizes: tuple[int, ...] = ()


def record(node: fx.Node) -> OpRecord:
    """Return the record of `node`."""
    op_record: OpRecord = node.meta["record"]
    return op_record


def item(values: Any, key: Any) -> Any:
    """Return one of several values of an operation, as the target of a separate node."""
    return values[key]


def assign(_held: Tensor, _name: str, _value: Tensor) -> None:
    """Replace a buffer of the model with another tensor, as the target of a separate node."""
    raise NotImplementedError("the runner of the graph replaces this with an assignment to the buffer")


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model's operations, in order.

    Attributes:
        graph: Graph of torch.fx, with an OpRecord for every node but the output.
        device: Device in the graph that stands for the one on which the model will run.
        constants: Tensors with values that are not attributes of the model, by their names in the graph.
        changed: The last node that changed a storage in place, by storage.
        outputs: The model's outputs, with a node for every tensor.
        states: Names of what the pass changed: buffers and parameters, except running statistics of BatchNorms, and
            attributes that a leaf module changes itself.
        whole: Modules with children that could not be traced inside, with the reason.
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
        """The output node."""
        node: fx.Node = next(iter(reversed(self.graph.nodes)))
        return node
