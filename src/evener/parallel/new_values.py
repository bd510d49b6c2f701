"""Changes in place as new values: divided operations may make values, but not change them.

    part = y[:, :3]                     part = y[:, :3]
    part.relu_()                        part' = part.relu();  y' = with_part(y, part', where part is in y)
    y[:, 5] = 0                         y'' = assigned(y', (:, 5), 0)
    y + part                            y'' + part_of_whole(y'', where part is in y)

The pass on the meta device shows which tensors share memory. Each storage has one newest whole value, and older tensors
are read from that value after a change. If no older tensor is read, nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from evener.oracle.division.layout import Shape
from evener.parallel.op_registry import not_in_place
from evener.records.errors import InvalidInput
from evener.tracer.ir import OpRecord, TracedModel, item, record
from evener.tracer.meta_model import storage_of
from evener.tracer.nested import map_values


def with_new_values(traced: TracedModel, name: str) -> TracedModel:
    """Return `traced`, of the model `name`, without reads of tensors that were changed under another name.

    Raises:
        InvalidInput: A change cannot become a new value: the memory layout is unusual, or gradients must not see it.
    """
    changes = _Changes(traced.graph, name)
    for node in list(traced.graph.nodes):
        changes.follow(node)
    outputs = map_values(traced.outputs, lambda value: changes.instead.get(value, value) if _is_node(value) else value)
    changed = {**traced.changed, **{storage: last.node for storage, last in changes.newest.items() if last.is_added}}
    return replace(traced, outputs=outputs, changed=changed)


@dataclass(frozen=True)
class _Whole:
    """The value of a whole storage since a change.

    Attributes:
        node: The node that makes the value; the node of the change if it is unknown how to make the value.
        number: Number of the change.
        is_known: Whether `node` makes the whole value.
        is_added: Whether `node` is another node than the change.
    """

    node: fx.Node
    number: int
    is_known: bool
    is_added: bool


class _Changes:
    """Follows the changes of a graph from its first node to its last.

    Attributes:
        newest: The whole value of every storage changed so far.
        instead: The replacements of older values at the end of the graph.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self._graph, self._name = graph, name
        self._first: dict[int, fx.Node] = {}
        self.newest: dict[int, _Whole] = {}
        self.instead: dict[fx.Node, fx.Node] = {}

    def follow(self, node: fx.Node) -> None:
        """Let `node` read the newest values, then note what it changes."""
        for value in node.all_input_nodes if node.target is not item else ():
            if self._is_stale(value):
                new = self._read(value, node)
                node.replace_input_with(value, new)
                if node.op == "output":
                    self.instead[value] = new
        if node.op == "output":
            return
        if isinstance(record(node).value, Tensor):
            self._first.setdefault(storage_of(record(node).value), node)
        for changed in _changed(node):
            self._change(node, changed)

    def _is_stale(self, node: fx.Node) -> bool:
        value = record(node).value
        last = self.newest.get(storage_of(value)) if isinstance(value, Tensor) else None
        return last is not None and record(node).number < last.number

    def _read(self, old: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the newest value of `old`."""
        value, last = record(old).value, self.newest[storage_of(record(old).value)]
        if not last.is_known:
            line = record(last.node).line or f"{last.node} in {record(last.node).module or self._name}"
            raise InvalidInput(
                f"{self._name} reads a tensor that was changed under another name ({line}) and cannot be divided"
            )
        if _place(value) == _place(record(last.node).value):
            return last.node
        with self._graph.inserting_before(reader):
            made = self._graph.call_function(part_of_whole, (last.node, *_place(value)))
        modes = record(reader).modes if reader.op != "output" else None
        return _noted(made, last.node, value, last.number, modes=modes)

    def _change(self, node: fx.Node, changed: fx.Node) -> None:
        """Note that tensors that share memory with `changed` have other values after `node`."""
        value = record(changed).value
        last = self.newest.get(storage_of(value))
        result = self._result(node, changed)
        if result is None and changed.op == "get_attr":
            return  # running statistics, which the operation itself moves
        whole = self._first.get(storage_of(value)) if last is None else last.node
        made = None
        if result is not None and whole is not None and (last is None or last.is_known):
            made = None if _hides_gradients(node, value, whole) else self._with_part(whole, result, value)
        self.newest[storage_of(value)] = _Whole(made or node, record(node).number, made is not None, made is not node)

    def _with_part(self, whole: fx.Node, part: fx.Node, value: Tensor) -> fx.Node | None:
        """Return the node of `whole` with the new `part`, which lies like `value`; None if it cannot be made."""
        before = record(whole).value
        if _place(value) == _place(before):
            return part
        if not _is_whole(before) or before.dtype != value.dtype:
            return None
        with self._graph.inserting_after(part):
            made = self._graph.call_function(with_part, (whole, part, *_place(value)))
        return _noted(made, part, before, record(part).number, modes=record(part).modes)

    def _result(self, node: fx.Node, changed: fx.Node) -> fx.Node | None:
        """Return the node of the new value of `changed` after `node`; None if `node` returns something else."""
        seen, value = record(node), record(changed).value
        if node.target == "__setitem__":
            with self._graph.inserting_after(node):
                made = self._graph.call_function(assigned, node.args)
            return _noted(made, node, value, seen.number, modes=seen.modes)
        if not isinstance(seen.value, Tensor) or _place(seen.value) != _place(value):
            return None
        if storage_of(seen.value) != storage_of(value):
            return None
        node.kwargs = {key: one for key, one in node.kwargs.items() if key != "out"}
        is_alone = isinstance(node.target, str) and not_in_place(node.target) == node.target
        if is_alone and node.op == "call_method" and changed.op != "get_attr":
            node.op, node.target = "call_function", on_copy(str(node.target))
        return node


def _noted(made: fx.Node, like: fx.Node, value: Tensor, number: int, modes: Any) -> fx.Node:
    seen = record(like)
    made.meta["record"] = OpRecord(value=value, number=number, module=seen.module, line=seen.line, modes=modes)
    return made


def _changed(node: fx.Node) -> list[fx.Node]:
    """Return what `node` changed, once per storage: PyTorch counts changes of all views of a tensor together."""
    by_storage: dict[int, fx.Node] = {}
    for one in record(node).changes:
        first = by_storage.setdefault(storage_of(record(one).value), one)
        made = record(node).value
        if isinstance(made, Tensor) and _place(made) == _place(record(one).value) != _place(record(first).value):
            by_storage[storage_of(made)] = one
    return list(by_storage.values())


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _place(value: Tensor) -> tuple[Shape, Shape, int]:
    """Return the position of a tensor in its storage: sizes, strides, first element."""
    return tuple(value.shape), tuple(value.stride()), int(value.storage_offset())


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor is all of its storage, in order."""
    is_all = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return value.is_contiguous() and value.storage_offset() == 0 and is_all


def _hides_gradients(node: fx.Node, changed: Tensor, first: fx.Node) -> bool:
    """Return whether gradients bypass a change: it happens without gradients, or through a detached tensor."""
    modes = record(node).modes
    is_quiet = (modes is not None and not modes.grad) or not changed.requires_grad
    return bool(is_quiet and record(first).value.requires_grad)


def with_part(whole: Tensor, part: Tensor, size: Shape, stride: Shape, offset: int) -> Tensor:
    """Return a copy of `whole` with `part` at a position."""
    made = whole.clone(memory_format=torch.contiguous_format)
    made.as_strided(size, stride, offset).copy_(part)
    return made


def part_of_whole(whole: Tensor, size: Shape, stride: Shape, offset: int) -> Tensor:
    """Return the part of `whole` at a position."""
    contiguous = whole.contiguous()
    return contiguous.as_strided(size, stride, contiguous.storage_offset() + offset)


def assigned(whole: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of `whole` with `value` at `index`."""
    made = whole.clone()
    made[index] = value
    return made


@cache
def on_copy(method: str) -> Callable[..., Any]:
    """Return a function that applies the in-place `method` of a tensor to a copy; always the same function object."""

    def changed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.clone(), method)(*args, **kwargs)

    changed.__qualname__ = changed.__name__ = method
    return changed
