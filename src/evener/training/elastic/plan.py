"""The plan of a divided model's run for the present nodes, which divide it as the first plan does.

Samples and layers are divided again, in proportion to the shares of the first plan; micro-batches stay, as they decide
what BatchNorm sees. A replica keeps its remaining nodes; if one replica remains, its layers are divided. A node that
the first plan does not name takes the place of a lost one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from evener.launch.nodes import NodeSpec, relative_shares
from evener.oracle.apportion import NodeCost
from evener.records.plan import Assignment, Plan, Strategy
from evener.training.planning import Rows, Shape, divide


def plan_among(first: Plan, nodes: Sequence[str], shares: str, came: Sequence[Assignment] = ()) -> Plan:
    """Return `first` divided among `nodes`, in the order of their ranks.

    Args:
        first: with which the run began.
        nodes: that are there, some of its own or of those that came.
        shares: the user's `--shares` for the nodes of the first plan.
        came: nodes that joined later, each in the place of one of the first plan, with its costs.

    Raises:
        InvalidInput: there are too few samples for the remaining nodes.
    """
    if list(nodes) == [assignment.node for assignment in first.assignments]:
        return first
    speeds = _speeds(first, shares, came)
    known = (*first.assignments, *came)
    rows = _rows(first, known, nodes)
    shape = Shape(
        strategy=_strategy(first.strategy, rows),
        rows=rows,
        micro_batches=first.accumulate,
        samples=first.micro_batch_size,
        shares=[speeds[node] for node in nodes],
    )
    by_name = {a.node: NodeSpec(name=a.node, device=a.device) for a in known}
    return divide(shape, [by_name[node] for node in nodes], (), first.batch_size)


def vacant_places(first: Plan, nodes: Sequence[str], came: Sequence[Assignment]) -> list[Assignment]:
    """Return the places of lost nodes in replicas that have fewer nodes than in the first plan."""
    sizes = _sizes_among((*first.assignments, *came), first, nodes)
    places: list[Assignment] = []
    for row, number in zip(first.replica_ranks, sizes, strict=True):
        gone = [first.assignments[rank] for rank in row if first.assignments[rank].node not in nodes]
        places += gone[: max(0, len(row) - number)]
    return places


def with_nodes(plan: Plan, came: Iterable[Assignment]) -> Plan:
    """Return `plan` with the unknown nodes of `came` as its last ranks."""
    known = [one.node for one in plan.assignments]
    new = [one for one in came if one.node not in known]
    if not new:
        return plan
    ranked = (msgspec.structs.replace(one, rank=len(known) + place) for place, one in enumerate(new))
    return msgspec.structs.replace(plan, assignments=(*plan.assignments, *ranked))


def came(plan: Plan, costs: Mapping[str, NodeCost]) -> list[Assignment]:
    """Return assignments without samples for the nodes of `costs`, which joined the run later."""
    return [
        Assignment(
            rank=0,
            node=node,
            device=plan.assignments[0].device,
            samples=0,
            fixed_seconds=cost.fixed_seconds,
            sample_seconds=cost.unit_seconds,
            max_samples=cost.max_units,
            reason="came when the run had begun",
        )
        for node, cost in costs.items()
    ]


def _speeds(first: Plan, shares: str, came: Sequence[Assignment]) -> dict[str, float]:
    """Return the relative speed of every node: the user's shares, else the measured speeds."""
    named = relative_shares(shares, len(first.assignments))
    if named is not None:
        usual = dict.fromkeys((a.node for a in came), sum(named) / len(named))
        return usual | {a.node: share for a, share in zip(first.assignments, named, strict=True)}
    known = (*first.assignments, *came)
    seconds = {a.node: a.fixed_seconds + a.sample_seconds * first.micro_batch_size for a in known}
    return {node: 1 / took if all(seconds.values()) else 1.0 for node, took in seconds.items()}


def _rows(first: Plan, known: Sequence[Assignment], nodes: Sequence[str]) -> Rows:
    """Return the ranks of every replica: neighbours, as many as remain of each."""
    sizes = _sizes_among(known, first, nodes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True) if size)


def _sizes_among(known: Sequence[Assignment], first: Plan, nodes: Sequence[str]) -> list[int]:
    """Return how many of `nodes` every replica has."""
    replicas = [first.assignments[row[0]].replica for row in first.replica_ranks]
    return [sum(one.node in nodes and one.replica == replica for one in known) for replica in replicas]


def _strategy(first: Strategy, rows: Rows) -> Strategy:
    """Return the strategy, without `data+` if one replica remains."""
    return cast(Strategy, first.removeprefix("data+")) if len(rows) == 1 else first
