"""A node's part in one run, from the job that it receives until its release.

    Prepare -> fetch code and data -> make the engine -> Ready
    ServerReply with a lease -> work -> Contribution -> ServerReply with a lease -> ...
    Validate -> Validated

Over a new connection all unanswered messages are sent again, and the master repeats its own. Both sides may send a
message twice; a lease is worked on once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from evener.ps.node.acceptance import Acceptance
from evener.ps.node.engine import Build, EngineSetup, NodeEngine
from evener.ps.node.node_examination import Look, look_at_machine
from evener.ps.node.rank_session import Host
from evener.ps.protocol.blob_transfer import BlobReceiver
from evener.ps.protocol.config import Versions
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import (
    BlobChunk,
    Contribution,
    FetchBlob,
    Header,
    Ready,
    ServerReply,
    Validate,
    Validated,
)
from evener.records.profile import DeviceProfile
from evener.records.schema import summable
from evener.sync.compression import as_bytes
from evener.sync.layout import Flat
from evener.sync.messages import Lease, Push
from evener.sync.worker import WorkerReplica
from evener.wire.frame import Buffer


class NodeConfig(NamedTuple):
    """Configuration of a node.

    Attributes:
        name: name of the node.
        device: device that computes.
        speed: 1, or the fraction to which it is throttled.
        data: folder of its own data; None if it has none.
        cache: folder of received files.
        versions: versions on this machine.
        measure: measures the profile of its device in a few seconds.
        build: makes engines.
        key: key by which a master recognises it; empty for none.
        is_named: whether its user chose its name.
        accepts: runs that it takes part in.
        look: returns the facts of its machine, for examinations.
        host: starts ranks that work together with those of other nodes; None if it cannot.
    """

    name: str
    device: str
    speed: float
    data: Path | None
    cache: Path
    versions: Versions
    measure: Callable[[], DeviceProfile]
    build: Build
    key: str = ""
    is_named: bool = True
    accepts: Acceptance = Acceptance()
    look: Look = look_at_machine
    host: Host | None = None


class SendToMaster(Protocol):
    """Sends messages to the master."""

    def __call__(self, header: Header, *buffers: Buffer) -> None:
        """Send a frame."""
        ...


class WorkerSession:
    """A node's part in one job; close it.

    Args:
        job: job to do.
        config: configuration of the node.
        send: see above.
        between_steps: called between local steps; raises if the run is over.
    """

    def __init__(self, job: Job, config: NodeConfig, send: SendToMaster, between_steps: Callable[[], None]) -> None:
        self.job, self._config, self._send, self._between_steps = job, config, send, between_steps
        self._blobs = BlobReceiver(config.cache / "blobs")
        self._engine: NodeEngine | None = None
        self._replica: WorkerReplica | None = None
        self._leases: deque[Lease] = deque()
        self._unanswered: dict[int, tuple[Push, memoryview]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether code, data and engine are complete."""
        return self._replica is not None

    @property
    def can_work(self) -> bool:
        """Whether a lease can be worked on now."""
        replica = self._replica
        return bool(self._leases) and replica is not None and len(replica.underway) < self.job.agreement.depth

    def start(self) -> None:
        """Request missing blobs; make the engine if none is missing. Raises the errors of the task's own code."""
        self._fetch(self._blobs.request(self.job.blobs))
        self._make_engine_if_complete()

    def on_chunk(self, chunk: BlobChunk, data: memoryview) -> None:
        """Write a piece of a blob; make the engine if it was the last one. Raises as `start`, and OSError."""
        self._fetch(self._blobs.receive(chunk, data))
        self._make_engine_if_complete()

    def on_reply(self, reply: ServerReply, image: memoryview | None) -> None:
        """Take an answer of the server."""
        answer, replica = reply.answer, self._replica
        if replica is None:
            return
        if answer.answers is not None:
            self._unanswered.pop(answer.answers, None)
        replica.take(answer, image)
        if answer.resets_leases:
            self._leases.clear()
        if answer.lease is not None and not self._knows(replica, answer.lease.number):
            self._leases.append(answer.lease)

    def work(self) -> None:
        """Work on the oldest lease, and send the result."""
        assert self._replica is not None
        push, image = self._replica.work(self._leases.popleft())
        self._unanswered[push.number] = push, image
        self._send(Contribution(run=self.job.run, push=push), image)

    def validate(self, request: Validate, weights: memoryview) -> None:
        """Validate the weights on a slice of the validation data, and send the result."""
        if self._engine is None:
            return
        loss, correct = self._engine.validate(Flat(self.job.layout, as_bytes(weights)), request.first, request.size)
        self._send(Validated(run=self.job.run, number=request.number, loss=summable(loss), correct=correct))

    def resend(self) -> None:
        """Send unanswered messages again, over a new connection; the master repeats the valid leases."""
        self._fetch(self._blobs.resume())
        for push, image in self._unanswered.values():
            self._send(Contribution(run=self.job.run, push=push), image)

    def drop_leases(self) -> None:
        """Forget all leases: other nodes have them now."""
        self._leases.clear()

    def close(self) -> None:
        """End the part in the run."""
        self._blobs.close()
        if self._engine is not None:
            self._engine.close()

    def _fetch(self, fetches: list[FetchBlob]) -> None:
        for fetch in fetches:
            self._send(fetch)

    def _make_engine_if_complete(self) -> None:
        if self.is_ready or not self._blobs.is_complete:
            return
        self._engine = self._config.build(self._engine_setup())
        unit_seconds = self._engine.unit_seconds()
        self._replica = WorkerReplica(self._engine, self.job.agreement)
        self._send(Ready(run=self.job.run, unit_seconds=unit_seconds))

    def _engine_setup(self) -> EngineSetup:
        """Return the engine's parameters; its data are those of the job, the node's own, or those that the command
        named.
        """
        job, config = self.job, self._config
        shared = Path(job.data_dir) if job.data_dir else None
        return EngineSetup(
            job=job,
            code=self._blobs.path_of(job.code) if job.code else None,
            data=self._blobs.path_of(job.data) if job.data else shared and (config.data or shared),
            device=config.device,
            speed=config.speed,
            between_steps=self._between_steps,
        )

    def _knows(self, replica: WorkerReplica, number: int) -> bool:
        return number in replica.underway or any(lease.number == number for lease in self._leases)
