"""Schedules: when the weights change and which worker may begin, in rounds (staleness 0) or with each contribution.

Synchronous: the weights change when all workers of a round have contributed, or are gone. As many rounds are open at a
time as a worker may have contributions in progress: one, or two if communication overlaps with work. They close in
order. A new worker takes part from the next round on. A round may close without workers that are late. Their
contributions enter the round in which they arrive; if none is open, they count by their part of their own round.

Asynchronous: each contribution changes the weights as soon as it arrives, and its worker continues. With a bound s no
worker begins that has had, or has begun, more than s updates more than the slowest has finished. The slowest may always
begin, so that some worker always continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.agreements.aggregator import Aggregator, Received
from evener.agreements.layout import Flat
from evener.agreements.messages import Judgement, Lease, ServerOutput
from evener.agreements.update import Merging
from evener.agreements.worker_record import WorkerRecord


@dataclass(slots=True)
class Round:
    """One round.

    Attributes:
        leases: leases by worker, in the order in which contributions are summed, without lost workers.
        missing: workers that are still awaited.
        contributions: contributions that have arrived, by worker.
        judged: refused contributions, by worker.
        arrived: received bytes of each contribution, by worker.
        merging: mean of all contributions, begun while they arrive.
        num_samples: samples of all leases before the first worker was late; 0 if none is.
    """

    leases: dict[str, Lease]
    missing: set[str]
    contributions: dict[str, Received] = field(default_factory=dict)
    judged: dict[str, Judgement] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    merging: Merging | None = None
    num_samples: int = 0

    def leave_out(self, worker: str) -> None:
        """Stop waiting for `worker`, and start merging again without its contribution."""
        self.missing.discard(worker)
        del self.leases[worker]
        self.merging = None


class Synchronous:
    """Opens rounds and closes them.

    Args:
        aggregator: common part of the server.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._rounds: deque[Round] = deque()
        self._late: dict[str, tuple[Lease, int]] = {}
        self._from_late: list[Received] = []
        self._late_round = 0

    @property
    def open_round(self) -> Round | None:
        """The round that closes next; None if there is none."""
        return self._rounds[0] if self._rounds else None

    def skip(self, worker: WorkerRecord) -> ServerOutput:
        """Close the oldest round without a late worker, whose contribution enters a later one."""
        one = self.open_round
        if one is None or worker.name not in one.missing:
            return ServerOutput()
        one.num_samples = one.num_samples or sum(lease.num_samples for lease in one.leases.values())
        self._late[worker.name] = one.leases[worker.name], one.num_samples
        one.leave_out(worker.name)
        return self._settle()

    def proceed(self) -> ServerOutput:
        """Open the rounds that may be open."""
        return self._settle()

    def join(self, _: WorkerRecord) -> ServerOutput:
        """Open a round with a new worker, if none is open."""
        return self._settle()

    def leave(self, worker: WorkerRecord) -> ServerOutput:
        """Continue without a worker; its contributions count."""
        self._late.pop(worker.name, None)
        for one in self._rounds:
            if worker.name in one.missing:
                one.leave_out(worker.name)
        return self._settle()

    def contribute(self, contribution: Received) -> ServerOutput:
        """Add a contribution to its round, a late one to the oldest that is open."""
        name = contribution.worker.name
        if self._late and self._is_late(name, contribution.lease):
            most = self._aggregator.workload.num_updates
            if most is not None and self._aggregator.common.version >= most:
                return self.refuse(contribution.worker, contribution.lease, "the run is complete")
            self._late_round = max(self._late_round, self._late.pop(name)[1])
            self._from_late.append(contribution)
            return ServerOutput() if self._rounds else self._settle()
        one = self._round_of(name, contribution.lease)
        one.contributions[name] = contribution
        one.missing.discard(name)
        return ServerOutput() if one.missing else self._settle()

    def refuse(self, worker: WorkerRecord, lease: Lease, reason: str) -> ServerOutput:
        """Refuse a contribution that cannot be used."""
        if self._is_late(worker.name, lease):
            del self._late[worker.name]
            judgement = self._aggregator.refuse(worker, lease, reason)
            replies = self._aggregator.replies({worker.name: judgement}, self._open_rounds())
            return ServerOutput(replies=replies, judgements=[judgement])
        one = self._round_of(worker.name, lease)
        one.judged[worker.name] = self._aggregator.refuse(worker, lease, reason)
        one.leave_out(worker.name)
        return self._settle()

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """Note the received bytes of a contribution, 0 as it begins, and merge the bytes received of all."""
        one = self.open_round
        if one is None or one.leases.get(worker) is not lease:
            return
        if num_bytes < one.arrived.get(worker, 0):  # it is sent again, perhaps with other numbers
            one.merging = None
        one.arrived[worker] = num_bytes
        least = min([self._num_bytes(one, name) for name in one.leases])
        if least > 0 and len(one.leases) > 1:
            self._merging(one).advance(least)

    def is_pending(self, number: int) -> bool:
        """Return whether the contribution to lease `number` waits for the end of its round."""
        return any(lease.number == number for lease in self.unmerged()) or any(
            judgement.number == number for one in self._rounds for judgement in one.judged.values()
        )

    def unmerged(self) -> list[Lease]:
        """Return the leases whose contributions wait for the end of their round."""
        waiting = [c.lease for one in self._rounds for c in one.contributions.values()]
        return waiting + [c.lease for c in self._from_late]

    @property
    def late(self) -> frozenset[str]:
        """The workers whose contributions are late."""
        return frozenset(self._late)

    def _is_late(self, worker: str, lease: Lease) -> bool:
        return worker in self._late and self._late[worker][0] is lease

    def _round_of(self, worker: str, lease: Lease) -> Round:
        for one in self._rounds:
            if one.leases.get(worker) is lease:
                return one
        raise AssertionError(f"lease {lease.number} of {worker} is of no open round")

    def _num_bytes(self, one: Round, worker: str) -> int:
        """Return the received bytes of the contribution of `worker`."""
        return self._aggregator.buffers.num_bytes if worker in one.contributions else one.arrived.get(worker, 0)

    def _merging(self, one: Round) -> Merging:
        if one.merging is None:
            flats = [self._flat(one, name) for name in one.leases]
            one.merging = self._aggregator.merging(flats, [lease.num_samples for lease in one.leases.values()])
        return one.merging

    def _flat(self, one: Round, worker: str) -> Flat:
        """Return the memory of the contribution of `worker`."""
        here = one.contributions.get(worker)
        return (here.page if here else self._aggregator.buffers.page(worker)).flat

    def _settle(self) -> ServerOutput:
        """Close complete rounds, open new ones, and return the answers."""
        output, rounds = ServerOutput(), self._rounds
        if not rounds or rounds[0].missing:
            output.replies += self._aggregator.replies({}, self._open_rounds())
        while (rounds and not rounds[0].missing) or (self._from_late and not rounds):
            late, self._from_late = self._from_late, []
            if rounds:
                one = rounds.popleft()
            else:
                one = Round({}, set())
                _shorten(late, self._late_round)
            self._late_round = 0
            contributions = [one.contributions[name] for name in one.leases] + late
            update, judged = self._aggregator.update(contributions, None if late else one.merging)
            if one.judged:
                judged = one.judged | judged
            if update is not None:
                output.updates.append(update)
            output.judgements += judged.values()
            output.replies += self._aggregator.replies(judged, self._open_rounds())
        return output

    def _on_time(self) -> list[WorkerRecord]:
        """Return the workers of a new round: all without a late contribution that is awaited or not yet merged."""
        late = {*self._late, *(one.worker.name for one in self._from_late)}
        return [one for one in self._aggregator.staying if one.name not in late]

    def _open_rounds(self) -> dict[str, list[Lease]]:
        """Open as many rounds as may be open; return the new leases by worker, the oldest first."""
        new_leases: dict[str, list[Lease]] = {}
        server = self._aggregator
        while (
            len(self._rounds) < server.agreement.depth
            and len(server.staying) >= max(1, server.quorum)
            and server.may_update(len(self._rounds))
        ):
            workers = self._on_time() if self._late or self._from_late else server.staying
            leases = server.assigner.divide(server.common.version, workers) if workers else {}
            if not leases:
                break
            self._rounds.append(Round(leases, set(leases)))
            for name, lease in leases.items():
                new_leases.setdefault(name, []).append(lease)
        return new_leases


def _shorten(late: Sequence[Received], num_samples: int) -> None:
    """Shorten contributions to their part of a round of so many samples, whose other contributions are merged."""
    part = sum(one.num_samples for one in late) / num_samples
    for one in late:
        for array in one.page.flat.floats:
            np.multiply(array, part, out=array)


class Asynchronous:
    """Lets every worker continue, within the bound.

    Args:
        aggregator: common part of the server.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator

    def proceed(self) -> ServerOutput:
        """Assign the work that may begin."""
        return self._assign({})

    def join(self, worker: WorkerRecord) -> ServerOutput:
        """Let a new worker begin; it counts as having as many updates as the slowest."""
        others = [other.num_updates for other in self._aggregator.members if other is not worker]
        worker.num_updates = min(others, default=0)
        return self._assign({})

    def leave(self, _: WorkerRecord) -> ServerOutput:
        """Continue without a worker."""
        return self._assign({})

    def contribute(self, contribution: Received) -> ServerOutput:
        """Apply a contribution."""
        update, judged = self._aggregator.update([contribution])
        contribution.worker.num_updates += 1
        output = self._assign(judged)
        if update is not None:
            output.updates.append(update)
        return output

    def refuse(self, worker: WorkerRecord, lease: Lease, reason: str) -> ServerOutput:
        """Refuse a contribution that cannot be used; it counts as an update of its worker."""
        judgement = self._aggregator.refuse(worker, lease, reason)
        worker.num_updates += 1
        return self._assign({worker.name: judgement})

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """Do nothing until the contribution is complete."""

    def is_pending(self, _: int) -> bool:
        """Return False: no contribution waits."""
        return False

    def unmerged(self) -> list[Lease]:
        """Return nothing: no contribution waits."""
        return []

    def _assign(self, judged: dict[str, Judgement]) -> ServerOutput:
        """Assign all work that may begin, to the slowest first, and return the answers."""
        server, leases = self._aggregator, dict[str, list[Lease]]()
        for worker in sorted(server.staying, key=lambda one: one.num_updates):
            while self._may_begin(worker):
                lease = server.assigner.lease_one(server.common.version, worker, server.staying)
                if lease is None:
                    break
                leases.setdefault(worker.name, []).append(lease)
        return ServerOutput(replies=server.replies(judged, leases), judgements=list(judged.values()))

    def _may_begin(self, worker: WorkerRecord) -> bool:
        server, bound = self._aggregator, self._aggregator.agreement.staleness
        if len(worker.leases) >= server.agreement.depth or len(server.staying) < server.quorum:
            return False
        if not server.may_update(sum([len(other.leases) for other in server.members])):
            return False
        return bound is None or worker.num_updates + len(worker.leases) - self._slowest() <= bound

    def _slowest(self) -> int:
        """Return the smallest number of updates of workers that have, or could get, work."""
        server = self._aggregator
        with_work = [one for one in server.members if one.leases]
        candidates = server.staying if server.assigner.num_remaining > 0 else []
        return min([one.num_updates for one in (*with_work, *candidates)], default=0)
