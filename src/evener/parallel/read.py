"""A module becomes a network: torch.fx follows its forward pass, a run on the meta device gives all shapes.

What fx cannot follow (control flow that depends on data) cannot be divided layer by layer, and is refused.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.errors import InvalidInput
from evener.parallel.operations import Builder, Reading


class Reader:
    """Reads a model, once for every shape of its inputs.

    Args:
        model: to be divided.

    Raises:
        InvalidInput: fx cannot follow it, or it assigns to parts of tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        try:
            graph = _Tracer().trace(model)
        except Exception as error:
            raise InvalidInput(
                f"{type(model).__name__} cannot be divided layer by layer, as torch.fx cannot follow it: {error}"
            ) from error
        _without_assignments(graph, model)
        self._shadow = fx.GraphModule(_on_meta(model), graph)

    def read(self, inputs: Sequence[Tensor]) -> Reading:
        """The model's operations for `inputs`, of which only shape and type matter."""
        values = _Shapes(self._shadow).values_for([torch.empty_like(x, device="meta") for x in inputs])
        return Builder(self._shadow, values).build()


class _Unpackable(fx.Proxy):
    """A tuple whose length is known, so that Python may iterate over it."""

    def __len__(self) -> int:
        chunks: Any = self.node.kwargs.get("chunks", (*self.node.args, 0)[1])
        return int(chunks)

    def __iter__(self) -> Iterator[fx.Proxy]:
        elements: Any = self
        return (elements[i] for i in range(len(self)))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Unpackable(node, self) if node.target in ("chunk", torch.chunk) else super().proxy(node)


class _Shapes(fx.Interpreter):
    """Runs a graph on the meta device and keeps what every node returned."""

    def values_for(self, inputs: Sequence[Tensor]) -> dict[fx.Node, Any]:
        self._values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            self.run(*inputs)
        return self._values

    def run_node(self, n: fx.Node) -> Any:
        self._values[n] = value = super().run_node(n)
        return value


def _without_assignments(graph: fx.Graph, model: nn.Module) -> None:
    """Let whoever reads a tensor after it was changed in place read the result of the change instead."""
    for node in graph.nodes:
        if node.target is operator.setitem:
            raise InvalidInput(f"{type(model).__name__} assigns to part of a tensor ({node}), which cannot be divided")
        if _changes_its_input(node, model):
            changed = node.args[0]
            changed.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: node < user)


def _changes_its_input(node: fx.Node, model: nn.Module) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.op == "call_function" and (
        node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
        or bool(node.kwargs.get("inplace"))
        or getattr(node.target, "__name__", "").endswith("_")
    )


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` without memory, in evaluation mode."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(t): _meta(t) for t in tensors}
    return copy.deepcopy(model, memo).eval()


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
