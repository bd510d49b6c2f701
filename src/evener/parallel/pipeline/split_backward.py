"""The backward pass of a stage in two parts: gradients of its inputs at once, those of its weights later.

    grads, later = backward_of_inputs(outputs, grad_outputs, inputs)     # runs what lies between outputs and inputs
    later()                                                              # runs the rest, and adds to the weights' .grad

An operation with weights lies on the path from the outputs to the inputs. Its gradient is kept when the first part
passes it; the second part continues from there to the weights (Qi et al., 2024). All sums are those of one pass. A
hook on a tensor in between is called in both parts.

A weight that two operations on the path use is computed in one pass: its second part would cross the first one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node: TypeAlias = Any
"""A node of autograd's graph, which has no public type."""


@dataclass(frozen=True)
class _Branch:
    """The weights that one operation on the path uses.

    Attributes:
        edges: the operation's results.
        weights: leaves, each reached from this operation alone.
    """

    edges: Sequence[GradientEdge]
    weights: Sequence[Tensor]


def backward_of_inputs(
    outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], object]]:
    """Return the gradients of `inputs`, and a function that adds those of all other leaves to their `.grad`.

    Args:
        outputs: computed from the inputs and from weights.
        grad_outputs: one for each output, of its shape; None for one scalar, whose gradient is 1.
        inputs: leaves. The gradient of one that no output depends on is None.
    """
    if not outputs:
        return [None] * len(inputs), lambda: None
    if not inputs:
        return [], partial(torch.autograd.backward, outputs, grad_outputs)
    branches = _branches(outputs, inputs)
    if branches is None:
        torch.autograd.backward(outputs, grad_outputs)
        return [tensor.grad for tensor in inputs], lambda: None
    wanted: list[Any] = [*inputs, *(edge for branch in branches for edge in branch.edges)]
    grads = torch.autograd.grad(outputs, wanted, grad_outputs, retain_graph=True, allow_unused=True)
    return list(grads[: len(inputs)]), partial(_add, branches, list(grads[len(inputs) :]))


def _add(branches: list[_Branch], grads: list[Tensor | None]) -> None:
    """Add to the gradients of the weights, the last operation first; what it kept is freed with it."""
    while branches:
        branch = branches.pop()
        pairs = [(edge, grad) for edge in reversed(branch.edges) if (grad := grads.pop()) is not None]
        if pairs:
            edges, arrived = zip(*pairs, strict=True)
            torch.autograd.backward(edges, arrived, inputs=branch.weights)


def _branches(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[_Branch] | None:
    """Return the branches from the path to weights, the last operation last; None if they cannot be divided."""
    roots = [get_gradient_edge(tensor) for tensor in outputs]
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    results = defaultdict[Node, set[int]](set)
    for root in roots:
        results[root.node].add(root.output_nr)
    path, leaves, seen = set[Node](), dict[Node, set[Node]](), set[Node]()
    branches = list[tuple[Node, set[Node]]]()
    for node in _in_order([root.node for root in roots]):
        edges = [(child, number) for child, number in node.next_functions if child is not None]
        children = [child for child, _ in edges]
        for child, number in edges:
            results[child].add(number)
        below = set[Node]().union(*(leaves[child] for child in children if child not in path))
        if node in ends or any(child in path for child in children):
            path.add(node)
            if not seen.isdisjoint(below):
                return None
            seen |= below
            if below:
                branches.append((node, below))
        else:
            leaves[node] = {node} if hasattr(node, "variable") else below
    if any(root.node not in path for root in roots):
        return None
    return [
        _Branch([GradientEdge(node, number) for number in sorted(results[node])], [leaf.variable for leaf in below])
        for node, below in branches
    ]


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes below `roots`, each after those that it leads to."""
    order, seen, stack = list[Node](), set[Node](), [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order
