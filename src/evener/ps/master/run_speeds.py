"""How fast the nodes of one run are believed to be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from evener.oracle.apportion import Worker
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.sync.parameter_server import ParameterServer
from evener.sync.worker_record import WorkerRecord, seconds_of

_MOST_TIMES = 4.0
"""Of the seconds that others needed for a round, what they wait for a line beyond the patience."""
_SEND_LESS = "--compress int8, or --agreement average with more --local-steps, sends less"


class ThinLine(NamedTuple):
    """A node whose line takes so long that everybody waits: so many seconds, where others needed so many."""

    node: NodeRecord
    seconds: float
    others: float

    def words(self, told: str) -> str:
        """What there is to say of it, which was told to send `told`, or else is left out."""
        took = f"{self.seconds:.0f} s for what others did in {self.others:.1f} s"
        return f"the line of node {self.node.name} took {took}; {f'it is told to send {told}' if told else _SEND_LESS}"


class RunSpeeds:
    """Of the nodes of one run.

    Args:
        server: of the run.
        nodes: all that the master knows.
    """

    def __init__(self, server: ParameterServer, nodes: Nodes) -> None:
        self._server, self._nodes = server, nodes

    @property
    def costs(self) -> dict[str, Worker]:
        """What samples cost everybody who works."""
        members = self._server.members
        seconds = seconds_of([member.speed for member in members])
        return {one.name: Worker(unit_seconds=each) for one, each in zip(members, seconds, strict=True)}

    @property
    def validators(self) -> dict[str, Worker]:
        """The same of those who are sent whole weights to validate: not over thin lines, if there are others."""
        costs = self.costs
        return {n: one for n, one in costs.items() if self._server.workers[n].thin_since is None} or costs

    def step_seconds(self) -> dict[NodeRecord, float]:
        """What a step is believed to take everybody who is at work."""
        costs, found = self.costs, dict[NodeRecord, float]()
        for member in self._server.members:
            if (lease := member.oldest_lease) is not None:
                seconds = costs[member.name].unit_seconds * lease.num_samples / lease.num_steps
                found[self._nodes.by_name[member.name]] = seconds
        return found

    def bound_claims(self, workers: Sequence[WorkerRecord]) -> None:
        """Believe nobody who has shown nothing yet to be faster than the middle of all."""
        usual = median(seconds_of([one.speed for one in workers]))
        for one in workers:
            one.speed.bound_claim(usual)

    def thin_lines(self, moving: Collection[NodeRecord], now: float) -> list[ThinLine]:
        """Those for whom more than half of the others wait, while bytes come or go, far longer than they needed.

        Lines that are as thin for everybody, and work that takes long, are waited for. Who was told to send less has as
        long again for what it had begun.

        Args:
            moving: those to whom something is on its way.
            now: seconds.
        """
        members, found = self._server.members, list[ThinLine]()
        for member in members:
            lease, node = member.oldest_lease, self._nodes.by_name[member.name]
            if lease is None or node.peer is None or (given := member.given.get(lease.number)) is None:
                continue
            others = sorted([one.begun - given for one in members if not one.leases and one.begun > given])
            if 2 * len(others) <= len(members) - 1 or (member.arriving is None and node not in moving):
                continue
            usual, work = others[len(others) // 2], (member.speed.seconds or 0.0) * lease.num_samples
            since = given if member.thin_since is None else max(given, member.thin_since)
            if now - since > self._nodes.patience + work + _MOST_TIMES * usual:
                found.append(ThinLine(node, now - given, usual))
        return found
