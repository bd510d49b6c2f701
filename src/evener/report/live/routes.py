"""Routes between the nodes of a run, which the page draws: sender, receiver, content, measured rate. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from evener.oracle.all_reduce_shares import shares_among
from evener.records.agreement import agreement_facts
from evener.records.plan import WHOLE_MODEL, Assignment, Plan, is_pipeline
from evener.records.schema import Part

MASTER = ""
"""Name of the master in a route."""


class RoutePicture(Part, frozen=True, kw_only=True):
    """A route from one node to another.

    Attributes:
        source: name of the node that sends; `MASTER` for the master.
        target: name of the node that receives; `MASTER` for the master.
        content: what is sent, in words.
        delay_seconds: latency of a small message, measured before the run; None: not measured.
        bytes_per_second: rate of a large message, measured before the run; None: not measured.
    """

    source: str
    target: str
    content: str
    delay_seconds: float | None = None
    bytes_per_second: float | None = None


class _Hop(NamedTuple):
    source: Assignment
    target: Assignment
    content: str


def routes(plan: Plan, names: Collection[str], agreement: str = "") -> list[RoutePicture]:
    """Return what the nodes `names` send each other, one route for each pair and direction.

    Args:
        plan: plan of the run; its ring holds what was measured.
        names: nodes that take part now.
        agreement: agreement by which nodes train through a master; empty: ranks exchange among themselves.
    """
    ranks = [one for one in plan.assignments if one.node in names]
    if agreement:
        return [route for name in names for route in _through_master(name, agreement)]
    delay, seconds_per_byte = plan.ring or (None, 0.0)
    rate = 1 / seconds_per_byte if seconds_per_byte else None
    contents: dict[tuple[str, str], list[str]] = {}
    for source, target, content in _hops(plan, ranks):
        if source.node != target.node:
            contents.setdefault((source.node, target.node), []).append(content)
    return [
        RoutePicture(
            source=source,
            target=target,
            content=", ".join(dict.fromkeys(several)),
            delay_seconds=delay,
            bytes_per_second=rate,
        )
        for (source, target), several in contents.items()
    ]


def _through_master(name: str, agreement: str) -> Iterator[RoutePicture]:
    facts = agreement_facts(agreement)
    yield RoutePicture(source=name, target=MASTER, content=facts.sends if facts else "gradients")
    yield RoutePicture(source=MASTER, target=name, content="weights")


def _hops(plan: Plan, ranks: Sequence[Assignment]) -> Iterator[_Hop]:
    replicas = [[one for one in ranks if one.rank in replica] for replica in plan.replica_ranks]
    if plan.strategy not in WHOLE_MODEL:
        for replica in replicas:
            yield from _within(plan, replica)
    if len(replicas) > 1 or "spatial" in plan.strategy:
        yield from _sums(ranks, plan.line_rates)


def _sums(ranks: Sequence[Assignment], line_rates: Mapping[str, float]) -> Iterator[_Hop]:
    """Yield the sums of gradients: by owners, where they are divided by the rates of the lines, else in a ring."""
    shares = shares_among([one.node for one in ranks], line_rates)
    if not shares:
        yield from _ring(ranks, "gradients")
    for owner, share in zip(ranks, shares, strict=False):
        for other in ranks if share else ():
            if other is not owner:
                yield _Hop(other, owner, "gradients")
                yield _Hop(owner, other, "sums of gradients")


def _within(plan: Plan, replica: Sequence[Assignment]) -> Iterator[_Hop]:
    """Yield what the ranks that hold one model together exchange."""
    if is_pipeline(plan.strategy):
        yield from _along(_stages(plan, replica))
    elif "spatial" in plan.strategy:
        by_rank = {one.rank: one for one in replica}
        for one in replica:
            is_last_column = (one.rank - replica[0].rank) % plan.columns == plan.columns - 1
            for rank in {one.rank + plan.columns} | (set() if is_last_column else {one.rank + 1}):
                if rank in by_rank:
                    yield _Hop(one, by_rank[rank], "edges of images")
                    yield _Hop(by_rank[rank], one, "edges of images")
    else:
        yield from _ring(replica, "parts of layers")


def _stages(plan: Plan, replica: Sequence[Assignment]) -> list[list[Assignment]]:
    """Return the ranks of every stage, first stage first."""
    ordered = sorted(replica, key=lambda one: (one.stage, one.rank))
    return [ordered[start : start + plan.members] for start in range(0, len(ordered), plan.members)]


def _along(stages: Sequence[Sequence[Assignment]]) -> Iterator[_Hop]:
    for stage in stages:
        yield from _ring(stage, "parts of layers")
    for before, after in pairwise(stages):
        for source, target in zip(before, after, strict=False):  # a stage may have lost a rank
            yield _Hop(source, target, "activations")
            yield _Hop(target, source, "gradients")


def _ring(ranks: Sequence[Assignment], content: str) -> Iterator[_Hop]:
    """Yield an all-reduce or all-gather: every rank sends to the next one."""
    for source, target in zip(ranks, [*ranks[1:], *ranks[:1]], strict=True):
        if source is not target:
            yield _Hop(source, target, content)
