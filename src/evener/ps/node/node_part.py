"""The base of a node's part in one run: it fetches code and data, takes the master's messages, and ends with the run.

Over a new connection a part sends its unanswered messages again, and the master repeats its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evener.ps.node.acceptance import Acceptance
from evener.ps.node.blob_fetcher import BlobFetcher, Serve
from evener.ps.node.checkpoint_sender import SendToMaster
from evener.ps.node.engine import Build
from evener.ps.node.node_examination import Look, look_at_machine
from evener.ps.node.rank_child import RankHost
from evener.ps.protocol.config import Versions
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import BlobChunk, FetchFrom, Header
from evener.ps.protocol.rank_messages import RankJob
from evener.records.profile import DeviceProfile

Buffers = Sequence[memoryview]
"""Buffers of a frame."""
Handler = Callable[[Any, Buffers], None]


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
        grace: seconds in which it finishes its work when it is asked to leave.
        leave_request: file that asks it to leave.
        serve: opens a server of pieces for other nodes; None if it serves none.
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
    host: RankHost | None = None
    grace: float = 0.0
    leave_request: Path | None = None
    serve: Serve | None = None


class NodePart(ABC):
    """A node's part in one run, from its job until its release; close it.

    All methods may raise the errors of the task's own code, EvenerError and OSError: the node then leaves the run.

    Args:
        job: job to do.
        config: configuration of the node.
        send: sends a message to the master.

    Attributes:
        job: job to do.
        handlers: methods for the master's messages about this run, by the types of their headers.
    """

    handlers: Mapping[type[Header], Handler]

    def __init__(self, job: Job | RankJob, config: NodeConfig, send: SendToMaster) -> None:
        self.job, self._config, self._send = job, config, send
        self._blobs = BlobFetcher(config.cache / "blobs", send, config.serve)

    @property
    @abstractmethod
    def is_prepared(self) -> bool:
        """Whether the engine, or the process, has been made of the code and data."""

    @abstractmethod
    def on_complete(self) -> None:
        """Continue with the code and data: they are complete, but for data that are read early."""

    def start(self) -> None:
        """Request missing code and data, and continue if nothing is missing."""
        self._blobs.request(self.job.blobs, self.job.data if self.job.reads_early else "")
        if self._blobs.can_begin:
            self.on_complete()

    def on_chunk(self, chunk: BlobChunk, data: memoryview) -> None:
        """Write a piece of code or data, and continue if it was the last one that the beginning needs."""
        could_begin = self._blobs.can_begin
        self._blobs.receive(chunk, data)
        if self._blobs.can_begin and not could_begin:
            self.on_complete()

    def on_fetch_from(self, where: FetchFrom) -> None:
        """Fetch a piece of code or data from another node."""
        self._blobs.fetch_from(where)

    def resend(self) -> None:
        """Send unanswered messages again, over a new connection."""
        self._blobs.resume()
        if self._blobs.can_begin and not self.is_prepared:
            self.on_complete()

    def close(self) -> None:
        """End the part in the run."""
        self._blobs.close()

    @property
    def code(self) -> Path | None:
        """Folder of the task's files; None for a built-in task."""
        return self._blobs.path_of(self.job.code) if self.job.code else None

    @property
    def data(self) -> Path | None:
        """Folder of the data: those of the job, or else the node's own, or else those that the command named."""
        shared = Path(self.job.data_dir) if self.job.data_dir else None
        return self._blobs.folder_of(self.job.data) if self.job.data else shared and (self._config.data or shared)
