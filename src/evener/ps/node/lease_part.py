"""A node's part in a run of an agreement: it works on leases, and validates.

    Prepare -> fetch code and data -> make the engine -> Ready
    ServerReply with a lease -> work -> Contribution -> ServerReply with a lease -> ...
    Validate -> Validated

Both sides may send a message twice; a lease is worked on once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from evener.agreements.compression import as_bytes
from evener.agreements.layout import Flat
from evener.agreements.messages import Lease, Push
from evener.agreements.worker import WorkerReplica
from evener.ps.node.checkpoint_sender import SendToMaster
from evener.ps.node.engine import EngineSetup, NodeEngine
from evener.ps.node.node_part import Buffers, NodeConfig, NodePart
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import (
    BlobChunk,
    Contribution,
    FetchFrom,
    Ready,
    ServerReply,
    Validate,
    Validated,
    Welcome,
)
from evener.records.errors import name_below
from evener.records.schema import MAX_FIXED_SAMPLES, summable
from evener.system.awaited_files import await_files, await_no_files


class LeasePart(NodePart):
    """A node's part in one job; close it.

    Args:
        job: job to do.
        config: configuration of the node.
        send: sends a message to the master.
        between_steps: called between local steps; raises if the run is over.
        check_run: raises if the run is over.
    """

    job: Job

    def __init__(
        self,
        job: Job,
        config: NodeConfig,
        send: SendToMaster,
        between_steps: Callable[[], None],
        check_run: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(job, config, send)
        self._between_steps, self._check_run = between_steps, check_run
        self._late_error: Exception | None = None
        self._engine: NodeEngine | None = None
        self._replica: WorkerReplica | None = None
        self._leases: deque[Lease] = deque()
        self._unanswered: dict[int, tuple[Push, memoryview]] = {}
        self.handlers = {ServerReply: self.on_reply, Validate: self.validate}

    @property
    def is_prepared(self) -> bool:
        """Whether code, data and engine are complete."""
        return self._replica is not None

    @property
    def can_work(self) -> bool:
        """Whether a lease can be worked on now."""
        replica = self._replica
        return bool(self._leases) and replica is not None and len(replica.underway) < self.job.agreement.depth

    def on_complete(self) -> None:
        """Make the engine. Raises the errors of the task's own code."""
        job, config = self.job, self._config
        if self.code is not None:
            name_below(self.code)
        if self.data is not None and job.reads_early:
            await_files(self.data, self._check_data)
        self._engine = config.build(
            EngineSetup(
                job=job,
                code=self.code,
                data=self.data,
                device=config.device,
                speed=config.speed,
                between_steps=self._between_steps,
            )
        )
        step, batch = self._engine.step_seconds(), job.agreement.batch
        self._require_data()
        self._replica = WorkerReplica(self._engine, job.agreement)
        fixed = min(step.fixed / step.each, MAX_FIXED_SAMPLES)
        self._send(Ready(run=job.run, unit_seconds=step(batch) / batch, fixed_samples=fixed))

    @property
    def takes_pieces_aside(self) -> bool:
        """Whether pieces of data are taken by the thread that receives, since another one may wait for them."""
        return self.job.reads_early and self._blobs.can_begin

    def take_aside(self, header: BlobChunk | FetchFrom | Welcome, buffers: Buffers) -> None:
        """Take a piece of data, or request missing ones over a new connection; the other thread raises errors."""
        try:
            if isinstance(header, BlobChunk):
                self._blobs.receive(header, buffers[0])
            elif isinstance(header, FetchFrom):
                self._blobs.fetch_from(header)
            else:
                self._blobs.resume()
        except Exception as error:
            self._late_error = error

    def _check_data(self) -> None:
        """Raise the error that ended the transfer of data, or that of a run that is over."""
        self._require_data()
        self._check_run()

    def _require_data(self) -> None:
        """Raise the error that ended the transfer of data, since the task's code may have caught it."""
        if self._late_error is not None:
            raise self._late_error

    def on_reply(self, reply: ServerReply, buffers: Buffers) -> None:
        """Take an answer of the server."""
        answer, replica = reply.answer, self._replica
        if replica is None:
            return
        if answer.answers is not None:
            self._unanswered.pop(answer.answers, None)
        replica.take(answer, buffers[0] if buffers else None)
        if answer.resets_leases:
            self._leases.clear()
        if answer.lease is not None and not self._knows(replica, answer.lease.number):
            self._leases.append(answer.lease)

    def work(self) -> None:
        """Work on the oldest lease, and send the result."""
        assert self._replica is not None
        push, image = self._replica.work(self._leases.popleft())
        self._require_data()
        self._unanswered[push.number] = push, image
        self._send(Contribution(run=self.job.run, push=push), image)

    def validate(self, request: Validate, buffers: Buffers) -> None:
        """Validate the weights on slices of the validation data, and send each result."""
        if self._engine is None:
            return
        weights = Flat(self.job.layout, as_bytes(buffers[0]))
        for part in request.slices:
            loss, correct = self._engine.validate(weights, part.first, part.size)
            self._require_data()
            self._send(Validated(run=self.job.run, number=part.number, loss=summable(loss), correct=correct))

    def resend(self) -> None:
        """Send unanswered messages again, over a new connection; the master repeats the valid leases."""
        super().resend()
        for push, image in self._unanswered.values():
            self._send(Contribution(run=self.job.run, push=push), image)

    def drop_leases(self) -> None:
        """Forget all leases: other nodes have them now."""
        self._leases.clear()

    def close(self) -> None:
        """End the part in the run."""
        if self._engine is not None:
            self._engine.close()
        if self.data is not None and self.job.reads_early:
            await_no_files(self.data)
        super().close()

    def _knows(self, replica: WorkerReplica, number: int) -> bool:
        return number in replica.underway or any(lease.number == number for lease in self._leases)
