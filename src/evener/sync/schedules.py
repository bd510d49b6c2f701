"""When the weights change and who may begin what: in rounds (staleness 0), or with each contribution by itself.

Synchronous: the weights change when all workers of a round have contributed, or are gone. As many rounds are open at a
time as a worker may have contributions under way: one, or two if communication overlaps with work. They close in order.
Who comes in between works from the next round on.

Asynchronous: each contribution changes the weights as soon as it comes, and its worker goes on. With a bound s nobody
begins who has had, or has begun, more than s turns more than the slowest has finished. The slowest may always begin, so
somebody always goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evener.sync.aggregator import Aggregator, Received
from evener.sync.layout import Flat
from evener.sync.messages import Judgement, Lease, ServerOutput
from evener.sync.update import Merging
from evener.sync.worker_record import WorkerRecord


@dataclass(slots=True)
class Round:
    """One round.

    Attributes:
        leases: of its workers, by name, in the order in which contributions are summed; not of those that are gone.
        missing: workers that are still awaited.
        contributions: that came, by name.
        judged: what was refused, by name.
        arrived: bytes of each contribution that are here, by name.
        merging: of all contributions, begun while they arrive.
    """

    leases: dict[str, Lease]
    missing: set[str]
    contributions: dict[str, Received] = field(default_factory=dict)
    judged: dict[str, Judgement] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    merging: Merging | None = None

    def leave_out(self, worker: str) -> None:
        """Do not wait for `worker` any longer, and merge anew without what has come of it."""
        self.missing.discard(worker)
        del self.leases[worker]
        self.merging = None


class Synchronous:
    """Opens rounds and closes them.

    Args:
        aggregator: of the server.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._rounds: deque[Round] = deque()

    def join(self, _: WorkerRecord) -> ServerOutput:
        """Somebody came."""
        return self._settle()

    def leave(self, worker: WorkerRecord) -> ServerOutput:
        """Somebody went; what it has contributed counts."""
        for one in self._rounds:
            if worker.name in one.missing:
                one.leave_out(worker.name)
        return self._settle()

    def contribute(self, contribution: Received) -> ServerOutput:
        """A contribution came."""
        name = contribution.worker.name
        one = self._round_of(name, contribution.lease)
        one.contributions[name] = contribution
        one.missing.discard(name)
        return ServerOutput() if one.missing else self._settle()

    def refuse(self, worker: WorkerRecord, lease: Lease, reason: str) -> ServerOutput:
        """A contribution came that cannot be used."""
        one = self._round_of(worker.name, lease)
        one.judged[worker.name] = self._aggregator.refuse(worker, lease, reason)
        one.leave_out(worker.name)
        return self._settle()

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """So much of a contribution is here, 0 as it begins: merge what is here of all."""
        one = self._rounds[0]
        if one.leases.get(worker) is not lease:
            return
        if num_bytes < one.arrived.get(worker, 0):  # it comes again, perhaps other than before
            one.merging = None
        one.arrived[worker] = num_bytes
        least = min([self._num_bytes(one, name) for name in one.leases])
        if least > 0 and len(one.leases) > 1:
            self._merging(one).advance(least)

    def is_pending(self, number: int) -> bool:
        """Whether the contribution to lease `number` is kept for the end of its round."""
        return any(c.lease.number == number for one in self._rounds for c in one.contributions.values()) or any(
            judgement.number == number for one in self._rounds for judgement in one.judged.values()
        )

    def unmerged(self) -> list[Lease]:
        """Leases whose contributions are kept for the end of their round."""
        return [c.lease for one in self._rounds for c in one.contributions.values()]

    def _round_of(self, worker: str, lease: Lease) -> Round:
        for one in self._rounds:
            if one.leases.get(worker) is lease:
                return one
        raise AssertionError(f"lease {lease.number} of {worker} is of no open round")

    def _num_bytes(self, one: Round, worker: str) -> int:
        """That are here of the contribution of `worker`."""
        return self._aggregator.buffers.num_bytes if worker in one.contributions else one.arrived.get(worker, 0)

    def _merging(self, one: Round) -> Merging:
        if one.merging is None:
            flats = [self._flat(one, name) for name in one.leases]
            one.merging = self._aggregator.merging(flats, [lease.num_samples for lease in one.leases.values()])
        return one.merging

    def _flat(self, one: Round, worker: str) -> Flat:
        """Where the contribution of `worker` is, or arrives."""
        here = one.contributions.get(worker)
        return (here.page if here else self._aggregator.buffers.page(worker)).flat

    def _settle(self) -> ServerOutput:
        """Close what is complete, open what can be opened, and say so."""
        output, rounds = ServerOutput(), self._rounds
        if not rounds or rounds[0].missing:
            output.replies += self._aggregator.replies({}, self._open_rounds())
        while rounds and not rounds[0].missing:
            one = rounds.popleft()
            update, judged = self._aggregator.update([one.contributions[name] for name in one.leases], one.merging)
            if one.judged:
                judged = one.judged | judged
            if update is not None:
                output.updates.append(update)
            output.judgements += judged.values()
            output.replies += self._aggregator.replies(judged, self._open_rounds())
        return output

    def _open_rounds(self) -> dict[str, list[Lease]]:
        """Open as many rounds as may be open; returns the new leases by worker, the oldest first."""
        found: dict[str, list[Lease]] = {}
        server = self._aggregator
        while (
            len(self._rounds) < server.agreement.depth
            and len(server.members) >= max(1, server.quorum)
            and server.may_update(len(self._rounds))
        ):
            leases = server.assigner.divide(server.common.version, server.members)
            if not leases:
                break
            self._rounds.append(Round(leases, set(leases)))
            for name, lease in leases.items():
                found.setdefault(name, []).append(lease)
        return found


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
        is_left = server.assigner.left > 0
        return min([one.turns for one in server.members if one.leases or is_left], default=0)
