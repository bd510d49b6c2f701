"""How fast the nodes of one run are believed to be."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from evener.oracle.apportion import Worker
from evener.ps.nodes import NodeRecord, Nodes
from evener.sync.parameter_server import ParameterServer
from evener.sync.worker_record import WorkerRecord, seconds_of


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
        """Believe nobody who has shown nothing yet to be much faster than the others."""
        usual = median(seconds_of([one.speed for one in workers]))
        for one in workers:
            one.speed.bound_claim(usual)
