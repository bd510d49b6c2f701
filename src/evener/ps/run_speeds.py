"""How fast nodes are, as far as the master itself has seen it: the time between a lease and its contribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        clock: seconds.
    """

    def __init__(self, server: ParameterServer, nodes: Nodes, clock: Callable[[], float]) -> None:
        self._server, self._nodes, self._clock = server, nodes, clock
        self._given: dict[str, dict[int, float]] = {}
        self._begun: dict[str, float] = {}
        self._arriving: dict[str, tuple[int, float]] = {}

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
        """Take nobody who has shown nothing yet for faster than is usual."""
        usual = median(seconds_of([one.speed for one in workers]))
        for one in workers:
            one.speed.bound_claim(usual)

    def given(self, name: str, number: int) -> None:
        """A lease has been sent to a node; to be told again changes nothing."""
        self._given.setdefault(name, {}).setdefault(number, self._clock())

    def arriving(self, name: str, number: int) -> None:
        """The first bytes of a contribution are here."""
        self._arriving[name] = number, self._clock()

    def seen(self, name: str, number: int) -> float | None:
        """Seconds that a node had for a contribution: since its lease, or since its last contribution began to come.

        None if nothing was seen of it.
        """
        begun, (arriving, now) = self._given.get(name, {}).pop(number, None), self._arriving.get(name, (-1, 0.0))
        if begun is None or arriving != number:
            return None
        begun, self._begun[name] = max(begun, self._begun.get(name, begun)), now
        return now - begun if now > begun else None

    def forget(self, name: str) -> None:
        """A node is lost, and what it had begun with it."""
        for known in (self._given, self._begun, self._arriving):
            known.pop(name, None)
