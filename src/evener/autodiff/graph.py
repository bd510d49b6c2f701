"""The engine: the graph of computations, and the loop that walks it backwards.

Every operation on a tensor that needs a gradient leaves a node. A node knows its rule, what the rule saved, and an edge
for every input: to the node that made it, to the leaf that collects its gradient, or None where none is wanted. Nodes
are numbered as they are made, so that walking them by falling numbers meets every node after all that used it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from itertools import count
from operator import attrgetter
from types import TracebackType
from typing import Any, NamedTuple

from evener.autodiff.backends.interface import Array, Backend, Lease, Shape
from evener.autodiff.errors import GraphFreed, ParameterChanged, TensorExpired

Forward = Callable[..., tuple[Any, Any]]
Vjp = Callable[[Any, Any, Any, Any], Any]

clock = count(1)
"""Numbers nodes and changes of parameters in order of time."""


class _Mode(threading.local):
    enabled = True


mode = _Mode()


class no_grad(ContextDecorator):
    """Disables recording inside `with no_grad():`, or in a function decorated with `@no_grad()`."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def _recreate_cm(self) -> no_grad:
        """Return a new context for each call of a decorated function, because several threads may call it."""
        return no_grad()

    def __enter__(self) -> None:
        self._before.append(mode.enabled)
        mode.enabled = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mode.enabled = self._before.pop()


def is_grad_enabled() -> bool:
    """Return whether operations are recorded."""
    return mode.enabled


class Leaf:
    """Collects the gradient of a leaf tensor.

    Attributes:
        shape: of the tensor.
        lease: of the tensor: the gradient lives as long.
        gradient: what was received; None if nothing was.
        room: memory for the gradient, such as a parameter's part of a flat buffer; None to take some when needed.
        changed_at: when the tensor's value was last changed by an optimiser or a loaded state.
    """

    __slots__ = ("changed_at", "gradient", "lease", "room", "shape")

    def __init__(self, shape: Shape, lease: Lease, room: Array | None = None) -> None:
        self.shape, self.lease, self.room, self.changed_at = shape, lease, room, 0
        self.gradient: Array | None = None

    def destination(self) -> Array | None:
        """Return memory for the first gradient; None if there is none, or a gradient exists already."""
        return self.room if self.gradient is None else None

    def receive(self, gradient: Array) -> None:
        """Add `gradient`; unless it is the array of `destination`, it is copied, because it may be shared."""
        backend = self.lease.backend
        if self.gradient is not None:
            backend.add(self.gradient, gradient, self.gradient)
        elif gradient is self.room:
            self.gradient = gradient
        else:
            self.gradient = backend.copy(gradient, self._memory(gradient) if self.room is None else self.room)

    def _memory(self, gradient: Array) -> Array:
        backend = self.lease.backend
        new = backend.new if self.lease is backend.place.lease else backend.empty  # not from an arena that ends sooner
        return new(self.shape, gradient.dtype)


class Rule(NamedTuple):
    """A primitive of differentiation, a row of `rules.RULES`: forward, and a vector-Jacobian product for every input.

    Attributes:
        forward: (backend, *input arrays, *arguments) -> (output, saved): `saved` is whatever the products will need.
        vjps: one for each input, in order: (backend, g, saved, out) -> the gradient of that input, where g is that of
            the output. It may be shaped as the output where the input was broadcast. `out` is an array of the input's
            shape that the gradient may be written into and returned, or None. g is never written to: others may hold
            it. Empty if the operation has no gradient.
        prepare: (backend, g, saved) -> what all vjps get for `saved`, computed once for all of them.
    """

    forward: Forward
    vjps: Iterable[Vjp] = ()
    prepare: Callable[[Any, Any, Any], Any] | None = None


class Node:
    """One recorded operation."""

    __slots__ = ("edges", "lease", "made_at", "rule", "saved", "shape")

    def __init__(self, rule: Rule, edges: Sequence[Node | Leaf | None], saved: Any, shape: Shape, lease: Lease) -> None:
        self.rule: Rule | None = rule
        self.edges, self.saved, self.shape, self.lease = edges, saved, shape, lease
        self.made_at = next(clock)

    def free(self) -> None:
        """Release the arrays that the rule saved, and the nodes before this one."""
        self.rule, self.edges, self.saved = None, (), None


def backward(root: Node, gradient: Array, retain_graph: bool) -> None:
    """Add to every leaf that `root` was computed from the gradient of sum(root * gradient).

    Raises:
        GraphFreed: a part of the graph was walked before, without `retain_graph`.
        ParameterChanged: an optimiser has changed a parameter since the forward pass.
        TensorExpired: a part of the graph was computed in an arena that has been reset.
    """
    nodes = _nodes_behind(root)
    pending = {root: gradient}
    summed: set[Node] = set()  # nodes whose pending gradient is a sum made here, which may be added to in place
    for node in nodes:
        _propagate(node, pending.pop(node), pending, summed)
        if not retain_graph:
            node.free()


def _propagate(node: Node, g: Array, pending: dict[Node, Array], summed: set[Node]) -> None:
    """Send the gradient `g` of a node's output along its edges."""
    rule, saved, backend = node.rule, node.saved, node.lease.backend
    assert rule is not None
    if rule.prepare is not None:
        saved = rule.prepare(backend, g, saved)
    for vjp, edge in zip(rule.vjps, node.edges):  # noqa: B905  a rule for any number of inputs has vjps without end
        if edge is None:
            continue
        partial = vjp(backend, g, saved, None if isinstance(edge, Node) else edge.destination())
        if partial.shape != edge.shape:
            partial = backend.sum_to(partial, edge.shape)
        if isinstance(edge, Node):
            _add(edge, partial, pending, summed, backend)
        else:
            edge.receive(partial)


def _add(node: Node, partial: Array, pending: dict[Node, Array], summed: set[Node], backend: Backend) -> None:
    before = pending.get(node)
    if before is None:
        pending[node] = partial
    elif node in summed:
        backend.add(before, partial, before)
    else:
        pending[node] = backend.add(before, partial)
        summed.add(node)


def _nodes_behind(root: Node) -> list[Node]:
    """Return `root` and all nodes that it was computed from, each before its own inputs."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        _check(node)
        for edge in node.edges:
            if isinstance(edge, Node) and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    return sorted(seen, key=attrgetter("made_at"), reverse=True)


def _check(node: Node) -> None:
    if node.rule is None:
        raise GraphFreed(
            "this graph was freed by an earlier backward(); call that one with retain_graph=True, or run forward again"
        )
    if not node.lease.alive:
        raise TensorExpired(
            f"iteration {node.lease.number} of an arena is over, and its graph with it: call backward() inside "
            "`with arena:`"
        )
    for edge in node.edges:
        if isinstance(edge, Leaf) and edge.changed_at > node.made_at:
            raise ParameterChanged(
                f"a parameter of shape {edge.shape} was changed after the forward pass had used it: "
                "call backward() before optimizer.step() and load_state_dict()"
            )
