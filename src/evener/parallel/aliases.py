"""Finds values that change under another name: operations that make new values only cannot compute those."""

from __future__ import annotations

from torch import Tensor, fx

from evener.errors import InvalidInput
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import storage_of


def refuse_partial_changes(traced: TracedModel, name: str) -> None:
    """Raises InvalidInput where a value changes that is read under another name."""
    changes: list[tuple[fx.Node, fx.Node]] = []
    for node in traced.operations:
        where = record(node).line or f"{node} in {record(node).module or name}"
        if node.target == "__setitem__" or (record(node).changes and "out" in node.kwargs):
            raise InvalidInput(f"{name} assigns to part of a tensor ({where}), which cannot be divided")
        for value in node.all_input_nodes:
            if any(_is_stale(value, change, changed) for change, changed in changes):
                raise InvalidInput(f"{name} reads a tensor that was changed through a view ({where}): not divisible")
        changes += [(node, changed) for changed in record(node).changes if changed.op != "get_attr"]


def _is_stale(value: fx.Node, change: fx.Node, changed: fx.Node) -> bool:
    """Whether `value` was made before `change`, and is a view of what that changed or the other way round."""
    is_older = record(value).number < record(change).number
    return is_older and (value in _view_of(changed) or changed in _view_of(value))


def _view_of(node: fx.Node) -> list[fx.Node]:
    """`node` and the values that it is a view of."""
    found = [node]
    while True:
        value = record(found[-1]).value
        sources = [
            one
            for one in found[-1].all_input_nodes
            if isinstance(value, Tensor)
            and isinstance(record(one).value, Tensor)
            and storage_of(record(one).value) == storage_of(value)
        ]
        if not sources:
            return found
        found.append(sources[0])
