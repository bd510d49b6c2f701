"""Staleness above 0: each contribution changes the weights as soon as it comes, and its worker goes on.

With a bound s nobody begins who has had, or has begun, more than s turns more than the slowest has finished. The
slowest may always begin, so somebody always goes on.
"""

from __future__ import annotations

from evener.sync.aggregator import Aggregator, Received
from evener.sync.messages import Judgement, Lease, ServerOutput
from evener.sync.worker_record import WorkerRecord


class Asynchronous:
    """Lets everybody go on, within the bound.

    Args:
        aggregator: of the server.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator

    def join(self, worker: WorkerRecord) -> ServerOutput:
        """Somebody came, and counts as having had as many turns as the slowest."""
        others = [other.turns for other in self._aggregator.members if other is not worker]
        worker.turns = min(others, default=0)
        return self._go_on({})

    def leave(self, _: WorkerRecord) -> ServerOutput:
        """Somebody went."""
        return self._go_on({})

    def contribute(self, contribution: Received) -> ServerOutput:
        """A contribution came: apply it."""
        update, judged = self._aggregator.update([contribution])
        contribution.worker.turns += 1
        output = self._go_on(judged)
        if update is not None:
            output.updates.append(update)
        return output

    def refuse(self, worker: WorkerRecord, lease: Lease, reason: str) -> ServerOutput:
        """A contribution came that cannot be used; its worker has had its turn."""
        judgement = self._aggregator.refuse(worker, lease, reason)
        worker.turns += 1
        return self._go_on({worker.name: judgement})

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """Nothing can be done before all is here."""

    def is_pending(self, _: int) -> bool:
        """Nothing is kept."""
        return False

    def unmerged(self) -> list[Lease]:
        """Nothing is kept."""
        return []

    def _go_on(self, judged: dict[str, Judgement]) -> ServerOutput:
        """Give out whatever work may be begun, to the slowest first, and say so."""
        server, found = self._aggregator, dict[str, list[Lease]]()
        for worker in sorted(server.members, key=lambda one: one.turns):
            while self._may_begin(worker):
                lease = server.assigner.lease_one(server.common.version, worker, server.members)
                if lease is None:
                    break
                found.setdefault(worker.name, []).append(lease)
        return ServerOutput(replies=server.replies(judged, found), judgements=list(judged.values()))

    def _may_begin(self, worker: WorkerRecord) -> bool:
        server, bound = self._aggregator, self._aggregator.agreement.staleness
        if len(worker.leases) >= server.agreement.depth or len(server.members) < server.quorum:
            return False
        if not server.may_update(sum([len(other.leases) for other in server.members])):
            return False
        return bound is None or worker.turns + len(worker.leases) - self._slowest() <= bound

    def _slowest(self) -> int:
        """Fewest turns of anybody who has, or could get, work."""
        server = self._aggregator
        is_left = server.assigner.cursor.left > 0
        return min([one.turns for one in server.members if one.leases or is_left], default=0)
