"""The believed speeds of the nodes of one run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import NamedTuple

from evener.agreements.parameter_server import ParameterServer
from evener.agreements.worker_record import WorkerRecord, seconds_of
from evener.oracle.apportion import NodeCost
from evener.ps.master.nodes import NodeRecord, Nodes

_MAX_FACTOR = 4.0
"""Factor of the others' time for a round, after which a slow link is no longer waited for."""
_SEND_LESS = "use --agreement average or diloco with more --local-steps, or --compress, to send less"
_QUORUM = 0.5
"""Share of a round's samples that has to be there before the round may close without the others."""
_LEAST_GRACE = 0.25
"""Share of the round's time so far for which late nodes are waited for in any case."""


class SlowLink(NamedTuple):
    """A node whose link delays all others: its seconds for a round, and the others'."""

    node: NodeRecord
    seconds: float
    others: float

    def sentence(self, compression: str) -> str:
        """Return a sentence about it; `compression` is what it uses from now on, empty if it is excluded instead."""
        took = f"{self.seconds:.0f} s for what others did in {self.others:.1f} s"
        action = f"it sends {compression} from now on" if compression else _SEND_LESS
        return f"the link of node {self.node.name} took {took}; {action}"


class RunSpeeds:
    """Speeds of the nodes of one run.

    Args:
        server: parameter server of the run.
        nodes: all nodes that the master knows.
    """

    def __init__(self, server: ParameterServer, nodes: Nodes) -> None:
        self._server, self._nodes = server, nodes

    @property
    def costs(self) -> dict[str, NodeCost]:
        """Costs of a step of all nodes at work; with a fixed part if batches are divided."""
        return {member.name: cost for member, cost in zip(self._server.members, self._server.costs, strict=True)}

    @property
    def validators(self) -> dict[str, NodeCost]:
        """Costs of the nodes that receive whole weights to validate: without slow links, if there are others."""
        costs = {name: replace(one, fixed_seconds=0.0) for name, one in self.costs.items() if name not in self.leaving}
        return {n: one for n, one in costs.items() if self._server.workers[n].slow_since is None} or costs

    @property
    def leaving(self) -> set[str]:
        """Names of the nodes at work that are about to leave."""
        return {one.name for one in self._server.members if one not in self._server.staying}

    def step_seconds(self) -> dict[NodeRecord, float]:
        """Return the predicted seconds of a step of each node at work."""
        costs, predictions = self.costs, dict[NodeRecord, float]()
        for member in self._server.members:
            if (lease := member.oldest_lease) is not None:
                seconds = costs[member.name].seconds(lease.num_samples / lease.num_steps)
                predictions[self._nodes.by_name[member.name]] = seconds
        return predictions

    def bound_claims(self, workers: Sequence[WorkerRecord]) -> None:
        """Bound the claimed speeds of nodes without measurements by the median of all."""
        usual = median(seconds_of([one.speed for one in workers]))
        for one in workers:
            one.speed.bound_claim(usual)

    def late(self, now: float) -> list[str]:
        """Return the late nodes, if the open round should close without them.

        While a node with a share m of the samples is awaited for t seconds, the others do not do the work of (1 - m) t
        seconds. Its own work, m T in a round that took T seconds so far, is not lost, but enters a later round. So it
        is awaited for at most m / (1 - m) T, and a little in any case, as durations vary.
        """
        one = self._server.open_round
        if one is None or not one.missing or not one.contributions:
            return []
        workers = self._server.workers
        total = sum(lease.num_samples for lease in one.leases.values())
        missing = sum(one.leases[name].num_samples for name in one.missing) / total
        sent = [workers[name].sent_at.get(one.leases[name].number) for name in one.missing]
        if missing > 1 - _QUORUM or None in sent:
            return []
        begun = min(at for at in sent if at is not None)
        seconds = max(workers[name].begun for name in one.contributions) - begun
        if not isfinite(seconds):  # those that contributed have left since
            return []
        grace = max(missing / (1 - missing), _LEAST_GRACE) * seconds
        return sorted(one.missing) if now - begun > seconds + grace else []

    def slow_links(self, moving: Collection[NodeRecord], now: float) -> list[SlowLink]:
        """Return the nodes for which more than half of the others wait, while bytes are moving, far longer than they
        needed.

        Links that are equally slow for all nodes, and long work, are waited for. A node that was asked to send less has
        as long again for the work that it had begun.

        Args:
            moving: nodes to which a message is being delivered.
            now: seconds.
        """
        members, lines = self._server.members, list[SlowLink]()
        for member in members:
            lease, node = member.oldest_lease, self._nodes.by_name[member.name]
            if lease is None or node.peer is None or (sent_at := member.sent_at.get(lease.number)) is None:
                continue
            others = sorted([one.begun - sent_at for one in members if not one.leases and one.begun > sent_at])
            if 2 * len(others) <= len(members) - 1 or (member.arriving is None and node not in moving):
                continue
            usual, work = others[len(others) // 2], (member.speed.seconds or 0.0) * lease.num_samples
            since = sent_at if member.slow_since is None else max(sent_at, member.slow_since)
            if now - since > self._nodes.patience + work + _MAX_FACTOR * usual:
                lines.append(SlowLink(node, now - sent_at, usual))
        return lines
