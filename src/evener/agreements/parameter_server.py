"""The parameter server, without sockets, clock or threads: messages go in, answers and updates come out.

The caller, which owns the sockets, has to follow these rules. It sends answers to each worker in order. It receives the
bytes of a contribution into `inbox` before it calls `push`. It dismisses lost workers. It admits a worker again that
has reconnected; the answer repeats all that the worker may have missed, and the worker repeats its unanswered messages.
"""

from __future__ import annotations

import copy

from evener.agreements.aggregator import Aggregator, Received, WholeMerge
from evener.agreements.data_assigner import full_samples
from evener.agreements.layout import Flat
from evener.agreements.messages import Answer, Judgement, Push, ServerOutput, WorkerReply
from evener.agreements.schedules import Asynchronous, Round, Synchronous
from evener.agreements.settings import AgreementSettings, Workload
from evener.agreements.snapshot import ServerState, Snapshot
from evener.agreements.threads import ThreadPool
from evener.agreements.worker_record import WorkerRecord, seconds_of
from evener.oracle.apportion import NodeCost
from evener.records.errors import require


class ParameterServer:
    """Synchronizes weights with workers that join and leave; call it from one thread at a time.

    Args:
        agreement: settings of the agreement.
        workload: data of the run, and when it is over.
        weights: initial weights; the server changes them.
        cores: threads that compute; by default the calling thread.
        quorum: workers that have to be present for work to begin or continue.
        first_number: number before the first lease. A server that continues a run takes a higher one than any lease
            before, such as the time in nanoseconds, so that answers to its predecessor are recognised as late.
        merge: merges contributions; None: `cores` do, in one pass.

    Attributes:
        workers: records of all workers that ever joined, by name; read-only, except for speeds.
        members: records of present workers, in the order in which they joined.
        staying: those of them that may get further work.
        push_bytes: size of a contribution, except from workers that send less.
    """

    def __init__(
        self,
        agreement: AgreementSettings,
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
        self.staying = self._aggregator.staying
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
        """Return a server that continues from `snapshot`; its workers have to be admitted again.

        Raises:
            InvalidFile: the snapshot lacks arrays of the optimizer.
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
        """The common weights; read-only, and only until the next message."""
        return self._aggregator.common.weights

    @property
    def version(self) -> int:
        """Number of updates of the weights."""
        return self._aggregator.common.version

    @property
    def quorum(self) -> int:
        """Workers that have to be present for work to begin or continue."""
        return self._aggregator.quorum

    @quorum.setter
    def quorum(self, quorum: int) -> None:
        self._aggregator.quorum = quorum

    @property
    def is_paused(self) -> bool:
        """Whether no further work may begin; call `proceed` after the end of a pause."""
        return self._aggregator.is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._aggregator.is_paused = is_paused

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        return self._aggregator.is_over()

    @property
    def costs(self) -> list[NodeCost]:
        """The believed cost of a step of each member, with a fixed part if batches are divided."""
        fixed, batch = self._aggregator.assigner.fixed_samples, self._aggregator.agreement.batch
        each = [batch / (fixed + batch) * seconds for seconds in seconds_of([one.speed for one in self.members])]
        return [NodeCost(unit_seconds=one, fixed_seconds=fixed * one) for one in each]

    def worker(self, name: str) -> WorkerRecord:
        """Return the record of a present, past or future worker.

        Raises:
            InvalidValue: the name is empty.
        """
        require(bool(name), "worker", name, "a name")
        record = self.workers.get(name)
        if record is None:
            record = self.workers[name] = WorkerRecord(name)
        return record

    def benchmark(self, name: str, unit_seconds: float, fixed_samples: float) -> None:
        """Use what a worker has measured: seconds per sample of a full batch, and `SpeedEstimate.fixed_samples`."""
        speed = self.worker(name).speed
        speed.benchmark(unit_seconds)
        speed.fixed_samples = fixed_samples
        self._aggregator.assigner.use_measurements(self.workers.values())

    def admit(self, name: str) -> ServerOutput:
        """Admit a worker; if it is present already, repeat all that it may have missed.

        Raises:
            InvalidValue: the name is empty.
        """
        worker = self.worker(name)
        if worker.is_here:
            return ServerOutput(replies=self._aggregator.resend(worker, None))
        worker.enter()
        self.members.append(worker)
        self.staying.append(worker)
        return self._schedule.join(worker)

    def dismiss(self, name: str) -> ServerOutput:
        """Remove a worker: others do its unfinished work, and its contributions count."""
        worker = self.workers.get(name)
        if worker is None or not worker.is_here:
            return ServerOutput()
        self.members.remove(worker)
        self.retire(name)
        for lease in worker.leases.values():
            self._aggregator.assigner.give_back(lease.samples)
        worker.is_here = False
        worker.leases.clear()
        self._aggregator.broadcast.forget(name)
        self._buffers.leave(name)
        worker.totals.dismissed += 1
        return self._schedule.leave(worker)

    def retire(self, name: str) -> None:
        """Give a worker no further work; it finishes its leases. The caller then dismisses it."""
        worker = self.workers.get(name)
        if worker is not None and worker in self.staying:
            self.staying.remove(worker)

    @property
    def open_round(self) -> Round | None:
        """The round that closes next; None if there is none, or updates are not made in rounds. Read-only."""
        return self._schedule.open_round if isinstance(self._schedule, Synchronous) else None

    @property
    def late(self) -> frozenset[str]:
        """The workers without which a round has closed, and that have not contributed since."""
        return self._schedule.late if isinstance(self._schedule, Synchronous) else frozenset()

    def skip(self, name: str) -> ServerOutput:
        """Close the open round without a late worker, if the agreement allows it."""
        worker = self.workers.get(name)
        if worker is None or not self._aggregator.agreement.skips_late or not isinstance(self._schedule, Synchronous):
            return ServerOutput()
        return self._schedule.skip(worker)

    def proceed(self) -> ServerOutput:
        """Assign the work that may begin now."""
        return self._schedule.proceed()

    def send_less(self, name: str, now: float) -> bool:
        """Reduce what a worker sends and receives, from its next answer on; return whether that is possible."""
        worker = self.worker(name)
        if worker.slow_since is not None or self._buffers.slow_link_bytes >= self.push_bytes:
            return False
        worker.slow_since = now
        self._aggregator.broadcast.forget(name)
        return True

    def inbox(self, name: str, number: int, num_bytes: int | None = None) -> memoryview | None:
        """Return memory for the contribution to lease `number`; None if it is not expected, or has another size.

        The caller receives and discards an unexpected one, and then calls `push` all the same.

        Args:
            name: name of the worker.
            number: number of the lease.
            num_bytes: bytes of the contribution; None: `push_bytes`.
        """
        worker = self.workers.get(name)
        if worker is None or number not in worker.leases or not self._fits(worker, num_bytes or self.push_bytes):
            return None
        if self._buffers.comes_in_parts:
            self._schedule.arrived(name, worker.leases[number], 0)
        worker.arriving = number
        return self._buffers.open(name, num_bytes)

    def arrived(self, name: str, number: int, num_bytes: int) -> None:
        """Note that the first `num_bytes` of a contribution are in its inbox, so that merging can begin."""
        if self._buffers.comes_in_parts and not self._buffers.is_packed(name):
            worker = self.workers.get(name)
            if worker is not None and (lease := worker.leases.get(number)) is not None:
                self._schedule.arrived(name, lease, num_bytes)

    def push(self, name: str, push: Push, num_bytes: int, seen: float | None = None) -> ServerOutput:
        """Take a contribution.

        Args:
            name: name of the worker.
            push: header of the contribution.
            num_bytes: bytes received; they are in the inbox if the contribution was expected.
            seen: seconds since the worker could begin, by the caller's clock; None: unknown.
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
                reason = "the contribution began to arrive before its lease was assigned, and was not stored"
            return self._schedule.refuse(worker, lease, reason)
        num_samples = lease.samples.num_samples
        if fixed := self._aggregator.assigner.fixed_samples:
            amount = full_samples(num_samples, lease.num_steps, fixed, self._aggregator.agreement.batch)
        else:
            amount = num_samples
        seconds = worker.speed.observe(amount, push.seconds, seen)
        page = self._buffers.take(name)
        return self._schedule.contribute(
            Received(worker, lease, num_samples, seconds, push.loss, page, num_bytes, frozenset(push.unused))
        )

    def _fits(self, worker: WorkerRecord, num_bytes: int) -> bool:
        return self._buffers.fits(num_bytes, is_slow_link=worker.slow_since is not None)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state from which another server can continue."""
        parts = self._aggregator
        outstanding = [lease for member in self.members for lease in member.leases.values()]
        state = ServerState(
            agreement=parts.agreement,
            workload=parts.workload,
            layout=self.weights.layout,
            num_updates=self.version,
            last_number=parts.assigner.number,
            cursor=parts.assigner.cursor_state(outstanding + self._schedule.unmerged()),
            unit_seconds={
                name: one.speed.seconds for name, one in self.workers.items() if one.speed.seconds is not None
            },
            totals={n: copy.copy(one.totals) for n, one in self.workers.items()},
            fixed_samples={
                name: one.speed.fixed_samples
                for name, one in self.workers.items()
                if one.speed.fixed_samples is not None
            },
        )
        arrays = {**parts.common.optimiser.arrays, **parts.broadcast.arrays}
        return Snapshot(state, self.weights.copy(), {name: array.copy() for name, array in arrays.items()})

    def _answer_unexpected(self, name: str, worker: WorkerRecord | None, push: Push) -> list[WorkerReply]:
        """Count a duplicate or late contribution; repeat the state, unless the end of the round will."""
        is_pending = self._schedule.is_pending(push.number)
        is_duplicate = is_pending or (worker is not None and worker.is_here and push.number in worker.answered)
        if worker is not None:
            worker.totals.duplicate += is_duplicate
            worker.totals.late += not is_duplicate
        if worker is None or not worker.is_here:
            reason = "not a member of the run; join first"
            answer = Answer(version=self.version, answers=push.number, verdict="late", reason=reason)
            return [WorkerReply(name, answer)]
        verdict = Judgement(name, push.number, "duplicate" if is_duplicate else "late")
        return [] if is_pending else self._aggregator.resend(worker, verdict)
