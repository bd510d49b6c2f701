"""Where a model may be cut, and what would travel there.

    operation 0 | operation 1 | operation 2 ...         position p is in front of operation p
       values that are made before p and used from p on live across it

A position is no cut where a value lives across that is changed in place behind it, where several outputs of one
operation have not been told apart yet, and between two uses of one thing that a pass changes (a counter, the statistics
of a BatchNorm): those have to happen on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.parallel.pipeline.skeleton import attribute, storage_of
from evener.parallel.pipeline.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A place where a model may be cut.

    Attributes:
        position: number of operations in front of it.
        nbytes: of all values that live across it, for the traced number of samples.
    """

    position: int
    nbytes: int


def cuts(trace: Trace, model: nn.Module) -> list[Cut]:
    """All places where the traced `model` may be cut, in order."""
    operations = trace.operations
    index = {node: i for i, node in enumerate(operations)}
    forbidden = _inseparable(trace, model, index)
    ends = {node: last_use(node, index) for node in trace.graph.nodes if node.op not in ("get_attr", "output")}
    live = [node for node in ends if node.op == "placeholder"]
    found = []
    for position in range(1, len(operations)):
        live = [node for node in (*live, operations[position - 1]) if ends[node] >= position]
        if not forbidden[position] and all(_may_cross(node, position, trace, index) for node in live):
            found.append(Cut(position=position, nbytes=sum(node.meta["value"].nbytes for node in live)))
    return found


def last_use(node: fx.Node, index: dict[fx.Node, int]) -> int:
    """Index of the last operation that uses the value; the model's outputs are used behind all operations."""
    return max((index.get(user, len(index)) for user in node.users), default=-1)


def _may_cross(node: fx.Node, position: int, trace: Trace, index: dict[fx.Node, int]) -> bool:
    value = node.meta["value"]
    if not isinstance(value, Tensor):
        return False
    changed = trace.changed.get(storage_of(value))
    return changed is None or index[changed] < position


def _inseparable(trace: Trace, model: nn.Module, index: dict[fx.Node, int]) -> list[bool]:
    """For every position, whether it lies between two uses of one thing that a pass changes."""
    uses: dict[int, list[int]] = {}
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    states = {id(norm) for norm in norms} | {id(model.get_buffer(name)) for name in trace.states}
    for node in trace.graph.nodes:
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            for part in (*module.modules(), *module.buffers()):
                if id(part) in states:
                    uses.setdefault(id(part), []).append(index[node])
        elif node.op == "get_attr":
            held = None if node.target in trace.constants else attribute(model, node.target)
            uses.setdefault(id(held), []).extend(index[user] for user in node.users)
    forbidden = [False] * len(index)
    for key, places in uses.items():
        if key in states:
            for position in range(min(places) + 1, max(places) + 1):
                forbidden[position] = True
    return forbidden
