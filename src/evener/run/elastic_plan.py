"""The plan of a divided model's run for the nodes that are there: as the first one divides, among fewer or others.

Samples and layers are divided anew, unevenly, by what the first plan gave each node; micro-batches stay, as they decide
what BatchNorm sees. A replica keeps as many nodes as are left of it; of one replica alone, its layers are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from evener.launch.nodes import LocalNode, relative_shares
from evener.plan import Plan, Strategy
from evener.run.planning import Rows, Shape, divide


def plan_among(first: Plan, nodes: Sequence[str], asked: str) -> Plan:
    """`first` divided among `nodes`, in the order of their ranks.

    Args:
        first: with which the run began.
        nodes: that are there, some of its own.
        asked: shares that the user named, as of the first plan's nodes.

    Raises:
        InvalidInput: there are too few samples for what is left.
    """
    if list(nodes) == [assignment.node for assignment in first.assignments]:
        return first
    speeds = _speeds(first, asked)
    rows = _rows(first, nodes)
    shape = Shape(
        strategy=_strategy(first.strategy, rows),
        rows=rows,
        micro_batches=first.accumulate,
        samples=first.micro_batch_size,
        shares=[speeds[node] for node in nodes],
    )
    by_name = {a.node: LocalNode(name=a.node, device=a.device) for a in first.assignments}
    return divide(shape, [by_name[node] for node in nodes], (), first.batch_size)


def _speeds(first: Plan, asked: str) -> dict[str, float]:
    """Of every node, relative: what the user said, else what was measured; a stage's share tells of its layers."""
    named = relative_shares(asked, len(first.assignments))
    if named is not None:
        return {a.node: share for a, share in zip(first.assignments, named, strict=True)}
    seconds = {a.node: a.fixed_seconds + a.sample_seconds * first.micro_batch_size for a in first.assignments}
    return {node: 1 / took if all(seconds.values()) else 1.0 for node, took in seconds.items()}


def _rows(first: Plan, nodes: Sequence[str]) -> Rows:
    """The ranks of every replica, which are neighbours: as many as are left of each."""
    left = [sum(first.assignments[rank].node in nodes for rank in row) for row in first.replica_ranks]
    starts = [sum(left[:index]) for index in range(len(left))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, left, strict=True) if size)


def _strategy(first: Strategy, rows: Rows) -> Strategy:
    """That of one replica, if one is left."""
    return cast(Strategy, first.removeprefix("data+")) if len(rows) == 1 else first
