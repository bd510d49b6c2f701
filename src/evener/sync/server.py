"""The parameter server, without sockets, clock or threads: messages go in, answers and updates come out.

Whoever has the sockets keeps a few rules: answers go to each worker in the order in which they come out; the bytes of a
contribution are received into `inbox` before `push` is called; a worker that is lost is dismissed; a worker that has
connected again is admitted again, which tells it all that it may have missed, and sends again what was not answered.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from evener.errors import require
from evener.oracle.apportion import Worker
from evener.sync.agreement import Agreement
from evener.sync.common import Common
from evener.sync.core import Contribution, Core, Judgement, Member
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.intake import Intake
from evener.sync.leases import Leasing
from evener.sync.messages import Answer, Lease, Outcome, Push, Reply, Tally
from evener.sync.pulls import Pulls
from evener.sync.rounds import Rounds
from evener.sync.snapshot import ServerState, Snapshot
from evener.sync.speeds import Speeds
from evener.sync.turns import Turns
from evener.sync.workload import Workload


class Server:
    """Agrees on weights with workers that come and go; to be called by one thread at a time.

    Args:
        agreement: how.
        workload: on what data, and when the run is over.
        weights: to begin with; the server changes them.
        cores: that compute; by default the calling thread.
        quorum: workers that have to be here for work to begin or go on.
        first_number: of the leases. A server that continues a run takes a higher one than any that was given out
            before, such as the time in nanoseconds, so that what was begun for its predecessor is recognised as late.
    """

    def __init__(
        self,
        agreement: Agreement,
        workload: Workload,
        weights: Flat,
        *,
        cores: Cores | None = None,
        quorum: int = 1,
        first_number: int = 0,
    ) -> None:
        layout, cores, speeds = weights.layout, cores or Cores(1), Speeds()
        common = Common(weights, agreement.outer, cores)
        self._core = Core(
            agreement=agreement,
            workload=workload,
            common=common,
            leasing=Leasing(agreement, workload, speeds, first_number),
            speeds=speeds,
            intake=Intake(layout, agreement.push, cores),
            pulls=Pulls(agreement, common, cores),
            cores=cores,
            merged=Flat(layout),
            quorum=quorum,
        )
        self._pace = Rounds(self._core) if agreement.staleness == 0 else Turns(self._core)

    @classmethod
    def resume(cls, snapshot: Snapshot, *, first_number: int, cores: Cores | None = None, quorum: int = 1) -> Server:
        """The successor of the server that the snapshot was taken of; its workers have to be admitted again.

        Raises:
            InvalidFile: the snapshot lacks arrays of the optimiser.
        """
        state = snapshot.state
        number = max(first_number, state.last_number)
        server = cls(state.agreement, state.workload, snapshot.weights, cores=cores, quorum=quorum, first_number=number)
        server._core.resume(snapshot)
        return server

    @property
    def weights(self) -> Flat:
        """The common weights; to be read only, and only until the next message."""
        return self._core.common.weights

    @property
    def version(self) -> int:
        """Updates that the weights have had."""
        return self._core.common.version

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of those who are here."""
        return tuple(self._core.members)

    @property
    def quorum(self) -> int:
        """Workers that have to be here for work to begin or go on."""
        return self._core.quorum

    @quorum.setter
    def quorum(self, quorum: int) -> None:
        self._core.quorum = quorum

    @property
    def leases(self) -> dict[str, tuple[Lease, ...]]:
        """What each worker that is here has not answered, by name, the oldest first: whose silence counts."""
        return {name: tuple(member.leases.values()) for name, member in self._core.members.items()}

    @property
    def seconds_per_sample(self) -> dict[str, float]:
        """As measured or benchmarked, by name of every worker that was."""
        return self._core.speeds.unit_seconds

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """What every worker that ever was here did, by name."""
        return self._core.tallies

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        return self._core.is_over()

    @property
    def push_bytes(self) -> int:
        """Size of every contribution."""
        return self._core.intake.num_bytes

    def admit(self, worker: str, cost: Worker | None = None, num_samples: int | None = None) -> Outcome:
        """Take `worker` in; or, if it is here already, tell it again all that it may have missed.

        Args:
            worker: its name.
            cost: of its samples, as benchmarked.
            num_samples: that it has; only if data stays on its node.

        Raises:
            InvalidValue: the name is empty, or `num_samples` is missing or has changed.
        """
        require(bool(worker), "worker", worker, "a name")
        core = self._core
        if (present := core.members.get(worker)) is not None:
            return Outcome(replies=core.restate(present, None))
        core.leasing.join(worker, num_samples)
        if cost is not None:
            core.speeds.expect(worker, cost)
        core.tally(worker)
        core.members[worker] = Member(worker)
        return self._pace.join(core.members[worker])

    def dismiss(self, worker: str) -> Outcome:
        """Let `worker` go: what it has begun is done by others, what it has contributed counts."""
        core = self._core
        member = core.members.pop(worker, None)
        if member is None:
            return Outcome()
        for lease in member.leases.values():
            core.leasing.take_back(worker, lease)
        core.pulls.forget(worker)
        core.intake.forget(worker)
        core.tally(worker).dismissed += 1
        return self._pace.leave(member)

    def inbox(self, worker: str, number: int) -> memoryview | None:
        """Where the contribution to lease `number` belongs, `push_bytes` bytes; None if it is not expected (any more).

        One that is not expected is read and thrown away, then `push` is called all the same.
        """
        member = self._core.members.get(worker)
        if member is None or number not in member.leases:
            return None
        self.arrived(worker, number, 0)
        return self._core.intake.open(worker)

    def arrived(self, worker: str, number: int, num_bytes: int) -> None:
        """Tell that the first `num_bytes` of a contribution lie in its inbox, so that merging can begin."""
        member = self._core.members.get(worker)
        if self._core.intake.comes_in_parts and member is not None and number in member.leases:
            self._pace.arrived(worker, member.leases[number], num_bytes)

    def push(self, worker: str, push: Push, num_bytes: int) -> Outcome:
        """Take a contribution.

        Args:
            worker: who sent it.
            push: what it says.
            num_bytes: that came with it; they lie in the inbox if they were expected and as many as expected.
        """
        core = self._core
        member = core.members.get(worker)
        if member is None or push.number not in member.leases:
            return Outcome(replies=self._answer_unexpected(worker, member, push))
        lease = member.leases.pop(push.number)
        member.answered.append(push.number)
        if num_bytes != self.push_bytes:
            core.intake.forget(worker)
            reason = f"the contribution must have {self.push_bytes} bytes, got {num_bytes}"
            return self._pace.refuse(member, lease, reason)
        core.speeds.observe(worker, lease.num_samples, push.seconds)
        return self._pace.contribute(Contribution(worker, lease, push, core.intake.take(worker)))

    def snapshot(self) -> Snapshot:
        """A copy of all that a successor needs to go on."""
        core = self._core
        outstanding = [(name, lease) for name, member in core.members.items() for lease in member.leases.values()]
        state = ServerState(
            agreement=core.agreement,
            workload=core.workload,
            layout=self.weights.layout,
            num_updates=self.version,
            last_number=core.leasing.number,
            stocks=core.leasing.stocks(outstanding + self._pace.unmerged()),
            unit_seconds=self.seconds_per_sample,
            tallies=copy.deepcopy(core.tallies),
        )
        arrays = {name: array.copy() for name, array in core.common.optimiser.arrays.items()}
        return Snapshot(state, self.weights.copy(), arrays)

    def _answer_unexpected(self, worker: str, member: Member | None, push: Push) -> list[Reply]:
        """Count what came twice or too late; say how things stand, unless the end of the round will."""
        core, is_pending = self._core, self._pace.is_pending(push.number)
        is_duplicate = is_pending or (member is not None and push.number in member.answered)
        verdict = Judgement(push.number, "duplicate" if is_duplicate else "late")
        if worker in core.tallies:
            core.tallies[worker].duplicate += is_duplicate
            core.tallies[worker].late += not is_duplicate
        if member is None:
            reason = "not a member of the run; ask to be admitted"
            answer = Answer(version=self.version, answers=push.number, verdict="late", reason=reason)
            return [Reply(worker, answer)]
        return [] if is_pending else core.restate(member, verdict)
