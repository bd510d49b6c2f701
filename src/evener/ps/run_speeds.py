"""How fast the nodes of one run are believed to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from evener.oracle.apportion import Worker
from evener.ps.nodes import NodeRecord, Nodes
from evener.sync.parameter_server import ParameterServer
from evener.sync.worker_record import WorkerRecord, seconds_of

_MOST_TIMES = 4.0
"""Of the seconds that others needed for a round, what they wait for a line beyond the patience."""


class ThinLine(NamedTuple):
    """A node whose line takes so long that everybody waits: so many seconds, where others needed so many."""

    node: NodeRecord
    seconds: float
    others: float


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

    def thin_lines(self, is_sending: Callable[[int], bool], now: float) -> list[ThinLine]:
        """Those for whom more than half of the others wait, while bytes come or go, far longer than they needed.

        Lines that are as thin for everybody, and work that takes long, are waited for.
        """
        members, found = self._server.members, list[ThinLine]()
        for member in members:
            lease, node = member.oldest_lease, self._nodes.by_name[member.name]
            if lease is None or node.peer is None or (given := member.given.get(lease.number)) is None:
                continue
            others = sorted([one.begun - given for one in members if not one.leases and one.begun > given])
            if 2 * len(others) <= len(members) - 1 or (member.arriving is None and not is_sending(node.peer)):
                continue
            usual, work = others[len(others) // 2], (member.speed.seconds or 0.0) * lease.num_samples
            if now - given > self._nodes.patience + work + _MOST_TIMES * usual:
                found.append(ThinLine(node, now - given, usual))
        return found
