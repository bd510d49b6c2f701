"""The parameter server, without sockets, clock or threads: messages go in, answers and updates come out.

Whoever has the sockets keeps a few rules: answers go to each worker in the order in which they come out; the bytes of a
contribution are received into `inbox` before `push` is called; a worker that is lost is dismissed; a worker that has
connected again is admitted again, which tells it all that it may have missed, and sends again what was not answered.
"""

from __future__ import annotations

import copy

from evener.records.errors import require
from evener.sync.aggregator import Aggregator, Received, WholeMerge
from evener.sync.layout import Flat
from evener.sync.messages import Answer, Judgement, Push, ServerOutput, WorkerReply
from evener.sync.protocol import SyncProtocol, Workload
from evener.sync.schedules import Asynchronous, Synchronous
from evener.sync.snapshot import ServerState, Snapshot
from evener.sync.threads import ThreadPool
from evener.sync.worker_record import WorkerRecord


class ParameterServer:
    """Agrees on weights with workers that come and go; to be called by one thread at a time.

    Args:
        agreement: how.
        workload: on what data, and when the run is over.
        weights: to begin with; the server changes them.
        cores: that compute; by default the calling thread.
        quorum: workers that have to be here for work to begin or go on.
        first_number: of the leases. A server that continues a run takes a higher one than any that was given out
            before, such as the time in nanoseconds, so that what was begun for its predecessor is recognised as late.
        merge: computes means of contributions; None: `cores` do, in one pass.

    Attributes:
        workers: the record of everybody who ever was here, by name; to be read only, speeds excepted.
        members: the records of those who are here, in the order in which they came.
        push_bytes: size of a contribution, but of workers that were told to send less.
    """

    def __init__(
        self,
        agreement: SyncProtocol,
        workload: Workload,
        weights: Flat,
        *,
        cores: ThreadPool | None = None,
        quorum: int = 1,
        first_number: int = 0,
        merge: WholeMerge | None = None,
    ) -> None:
        cores = cores or ThreadPool(1)
        self._aggregator = Aggregator(agreement, workload, weights, cores, first_number, quorum, merge)
        self._schedule = (Synchronous if agreement.staleness == 0 else Asynchronous)(self._aggregator)
        self._buffers = self._aggregator.buffers
        self.workers, self.members = self._aggregator.workers, self._aggregator.members
        self.push_bytes = self._buffers.num_bytes

    @classmethod
    def resume(
        cls,
        snapshot: Snapshot,
        *,
        first_number: int,
        cores: ThreadPool | None = None,
        quorum: int = 1,
        merge: WholeMerge | None = None,
    ) -> ParameterServer:
        """The successor of the server that the snapshot was taken of; its workers have to be admitted again.

        Raises:
            InvalidFile: the snapshot lacks arrays of the optimiser.
        """
        state = snapshot.state
        number = max(first_number, state.last_number)
        server = cls(
            state.agreement,
            state.workload,
            snapshot.weights,
            cores=cores,
            quorum=quorum,
            first_number=number,
            merge=merge,
        )
        server._aggregator.resume(snapshot)
        return server

    @property
    def weights(self) -> Flat:
        """The common weights; to be read only, and only until the next message."""
        return self._aggregator.common.weights

    @property
    def version(self) -> int:
        """Updates that the weights have had."""
        return self._aggregator.common.version

    @property
    def quorum(self) -> int:
        """Workers that have to be here for work to begin or go on."""
        return self._aggregator.quorum

    @quorum.setter
    def quorum(self, quorum: int) -> None:
        self._aggregator.quorum = quorum

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        return self._aggregator.is_over()

    def worker(self, name: str) -> WorkerRecord:
        """The record of a worker that is, was or will be here.

        Raises:
            InvalidValue: the name is empty.
        """
        require(bool(name), "worker", name, "a name")
        record = self.workers.get(name)
        if record is None:
            record = self.workers[name] = WorkerRecord(name)
        return record

    def admit(self, name: str) -> ServerOutput:
        """Take a worker in; or, if it is here already, tell it again all that it may have missed.

        Raises:
            InvalidValue: the name is empty.
        """
        worker = self.worker(name)
        if worker.is_here:
            return ServerOutput(replies=self._aggregator.restate(worker, None))
        worker.enter()
        self.members.append(worker)
        return self._schedule.join(worker)

    def dismiss(self, name: str) -> ServerOutput:
        """Let a worker go: what it has begun is done by others, what it has contributed counts."""
        worker = self.workers.get(name)
        if worker is None or not worker.is_here:
            return ServerOutput()
        self.members.remove(worker)
        for lease in worker.leases.values():
            self._aggregator.assigner.give_back(lease.samples)
        worker.is_here = False
        worker.leases.clear()
        self._aggregator.pulls.forget(name)
        self._buffers.forget(name)
        worker.totals.dismissed += 1
        return self._schedule.leave(worker)

    def send_less(self, name: str, now: float) -> bool:
        """Have a worker told, with its next answer, to send less and be sent less; whether there is less to be sent."""
        worker = self.worker(name)
        if worker.thin_since is not None or self._buffers.thin_bytes >= self.push_bytes:
            return False
        worker.thin_since = now
        self._aggregator.pulls.forget(name)
        return True

    def inbox(self, name: str, number: int, num_bytes: int | None = None) -> memoryview | None:
        """Where the contribution to lease `number` belongs; None if it is not expected (any more), or not so long.

        One that is not expected is read and thrown away, then `push` is called all the same.

        Args:
            name: of the worker.
            number: of the lease.
            num_bytes: that come; None: `push_bytes`.
        """
        worker = self.workers.get(name)
        if worker is None or number not in worker.leases or not self._fits(worker, num_bytes or self.push_bytes):
            return None
        if self._buffers.comes_in_parts:
            self._schedule.arrived(name, worker.leases[number], 0)
        worker.arriving = number
        return self._buffers.open(name, num_bytes)

    def arrived(self, name: str, number: int, num_bytes: int) -> None:
        """Tell that the first `num_bytes` of a contribution lie in its inbox, so that merging can begin."""
        if self._buffers.comes_in_parts and not self._buffers.is_packed(name):
            worker = self.workers.get(name)
            if worker is not None and (lease := worker.leases.get(number)) is not None:
                self._schedule.arrived(name, lease, num_bytes)

    def push(self, name: str, push: Push, num_bytes: int, seen: float | None = None) -> ServerOutput:
        """Take a contribution.

        Args:
            name: of the worker that sent it.
            push: what it says.
            num_bytes: that came with it; they lie in the inbox if they were expected and as many as expected.
            seen: seconds since the worker could begin it, by the clock of whoever has the sockets; None: nobody looked.
        """
        worker = self.workers.get(name)
        lease = None if worker is None else worker.leases.pop(push.number, None)
        if worker is None or lease is None:
            return ServerOutput(replies=self._answer_unexpected(name, worker, push))
        worker.answered.append(push.number)
        is_here, worker.arriving = worker.arriving == push.number, None
        if not (fits := self._fits(worker, num_bytes)) or not is_here:
            self._buffers.forget(name)
            reason = f"the contribution must have {self.push_bytes} bytes, got {num_bytes}"
            if fits:
                reason = "the contribution began to come before its work was given, and lies nowhere"
            return self._schedule.refuse(worker, lease, reason)
        num_samples = lease.samples.num_samples
        seconds = worker.speed.observe(num_samples, push.seconds, seen)
        page = self._buffers.take(name)
        return self._schedule.contribute(
            Received(worker, lease, num_samples, seconds, push.loss, page, num_bytes, frozenset(push.unused))
        )

    def _fits(self, worker: WorkerRecord, num_bytes: int) -> bool:
        return self._buffers.fits(num_bytes, is_thin=worker.thin_since is not None)

    def snapshot(self) -> Snapshot:
        """A copy of all that a successor needs to go on."""
        parts = self._aggregator
        outstanding = [lease for member in self.members for lease in member.leases.values()]
        state = ServerState(
            agreement=parts.agreement,
            workload=parts.workload,
            layout=self.weights.layout,
            num_updates=self.version,
            last_number=parts.assigner.number,
            stock=parts.assigner.stock(outstanding + self._schedule.unmerged()),
            unit_seconds={
                name: one.speed.seconds for name, one in self.workers.items() if one.speed.seconds is not None
            },
            totals={n: copy.copy(one.totals) for n, one in self.workers.items()},
        )
        arrays = {name: array.copy() for name, array in parts.common.optimiser.arrays.items()}
        return Snapshot(state, self.weights.copy(), arrays)

    def _answer_unexpected(self, name: str, worker: WorkerRecord | None, push: Push) -> list[WorkerReply]:
        """Count what came twice or too late; say how things stand, unless the end of the round will."""
        is_pending = self._schedule.is_pending(push.number)
        is_duplicate = is_pending or (worker is not None and worker.is_here and push.number in worker.answered)
        if worker is not None:
            worker.totals.duplicate += is_duplicate
            worker.totals.late += not is_duplicate
        if worker is None or not worker.is_here:
            reason = "not a member of the run; ask to be admitted"
            answer = Answer(version=self.version, answers=push.number, verdict="late", reason=reason)
            return [WorkerReply(name, answer)]
        verdict = Judgement(name, push.number, "duplicate" if is_duplicate else "late")
        return [] if is_pending else self._aggregator.restate(worker, verdict)
