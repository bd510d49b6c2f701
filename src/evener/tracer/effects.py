"""Side effects of a pass on a model: changed buffers, changed Python attributes, and random numbers of Python and
NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import storage_of
from evener.tracer.operation import NotAnOperation

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, tuple)


class States:
    """Records the buffers and parameters of a model, except the statistics of BatchNorms."""

    def __init__(self, model: nn.Module) -> None:
        norms = {id(buffer) for m in model.modules() if isinstance(m, _BatchNorm) for buffer in m.buffers()}
        named = [*model.named_buffers(), *model.named_parameters()]
        self._model = model
        self._before = [(name, tensor, tensor._version) for name, tensor in named if id(tensor) not in norms]

    def changed(self, storages: Mapping[int, Any]) -> list[str]:
        """Return names of tensors that were changed in place, or whose storage is in `storages`."""
        return [
            name
            for name, tensor, version in self._before
            if tensor._version != version or storage_of(tensor) in storages
        ]

    def replaced(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, old, new tensor) of replaced buffers. Raises NotAnOperation if one is not a tensor any more."""
        replacements = []
        for name, tensor, _ in self._before:
            path, _, last = name.rpartition(".")
            now = getattr(self._model.get_submodule(path), last)
            if not isinstance(now, Tensor):
                raise NotAnOperation(f"{name} is a {type(now).__name__} after the pass, not a tensor")
            if now is not tensor:
                replacements.append((name, tensor, now))
        return replacements


class PythonState:
    """Records a model's Python state: plain attributes of its modules, and the generators of Python and NumPy.

    Attributes:
        of_operations: Names of attributes that modules which are operations changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {id(module): _attributes_of(module) for module in model.modules()}
        self._generators = _generators()
        self.of_operations: list[str] = []

    def refuse_changes(self, path: str, module: nn.Module) -> None:
        """Raise NotAnOperation if other code changed the attributes of `module`, which is one operation."""
        for name, one in module.named_modules(prefix=path):
            before, now = self._before[id(one)], _attributes_of(one)
            if any(now[key] != before.get(key) for key in now if not isinstance(vars(one)[key], Tensor)):
                raise NotAnOperation(f"attributes of {name} are changed from outside of it")

    def note_changes(self, path: str, module: nn.Module) -> None:
        """Record the attributes that `module`, which was one operation, changed itself."""
        for name, one in module.named_modules(prefix=path):
            before, now = self._before[id(one)], _attributes_of(one)
            changed = [key for key in now if now[key] != before.get(key)]
            self.of_operations += [f"{name}.{key}" for key in changed if not isinstance(vars(one)[key], Tensor)]
            self._before[id(one)] = now

    @property
    def drew(self) -> bool:
        """Whether Python or NumPy has drawn random numbers."""
        return _generators() != self._generators

    @property
    def changed(self) -> set[str]:
        """Names of attributes that the model changed itself."""
        names = set()
        for path, module in self._model.named_modules():
            before, now = self._before[id(module)], _attributes_of(module)
            prefix = f"{path}." if path else ""
            names |= {prefix + name for name in {**before, **now} if before.get(name, self) != now.get(name, self)}
        return names


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return marks of a module's attributes, which differ if an attribute changes: values, sizes, identities."""
    return {name: _mark(value) for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def _mark(value: Any) -> Any:
    if isinstance(value, _PLAIN_TYPES):
        return value
    return (id(value), len(value)) if isinstance(value, _CONTAINERS) else (id(value),)


def _generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def reads_of(traced: TracedModel, names: Set[str]) -> list[fx.Node]:
    """Return nodes that read one of the attributes `names` of the model, if their values come from its inputs."""
    reads = [node for node in traced.graph.nodes if node.op == "get_attr" and str(node.target) in names]
    return [node for node in reads if record(node).value.is_meta]


def difference(one: TracedModel, other: TracedModel) -> fx.Node | None:
    """Return the first node of `one` that differs from `other`; its last node if only the lengths differ."""
    nodes: list[fx.Node] = list(one.graph.nodes)
    others: list[fx.Node] = list(other.graph.nodes)
    for node, like in zip(nodes, others, strict=False):
        if _described(node) != _described(like) or not _same_numbers(node, one, other):
            return node
    return nodes[min(len(nodes), len(others)) - 1] if len(nodes) != len(others) else None


def _described(node: fx.Node) -> Any:
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda value: value.name)
    function = getattr(node.target, "__qualname__", node.target)  # every pass may make a new hook
    return node.op, node.name, function, arguments, _modes(node)


def _modes(node: fx.Node) -> Any:
    return None if node.op == "output" else (record(node).modes, record(node).training)


def _same_numbers(node: fx.Node, one: TracedModel, other: TracedModel) -> bool:
    mine, its = (traced.constants.get(str(node.target)) for traced in (one, other))
    if node.op != "get_attr" or mine is None or its is None or mine.is_meta or its.is_meta:
        return True
    return mine.shape == its.shape and torch.equal(mine, its)
