"""A node's part in a run whose ranks work together: it fetches the code, starts a process, and relays its messages.

    PrepareRank -> fetch code and data -> RankReady
    StartRank -> a process -> RankSaid, RankShown ->    -> RankTold -> the process
    a checkpoint is written -> RankSaved -> FetchBlob -> RankPiece
    the process ends -> RankEnded

A thread sends the process's messages from a queue, so an absent master does not slow the computation. Over a new
connection all unanswered messages are sent again.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from evener.ps.node.acceptance import Acceptance
from evener.ps.node.checkpoint_sender import CHECKPOINTS, link_files
from evener.ps.node.rank_session import Host, RankSession, RankSetup
from evener.ps.protocol.blob_transfer import BlobReceiver
from evener.ps.protocol.config import RANKS
from evener.ps.protocol.messages import BlobChunk, FetchBlob, Header, NotReady, Release
from evener.ps.protocol.rank_messages import (
    PrepareRank,
    RankJob,
    RankReady,
    RankTold,
    StartRank,
    StopRank,
    decode_rank_job,
    decode_rank_place,
)
from evener.records.errors import EvenerError
from evener.records.schema import shown
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import Buffer

_NO_TORCH = "its ranks need PyTorch, which this node does not have or must not use"
Buffers = Sequence[memoryview]


class NodeRanks:
    """The ranks of this node; close it.

    Args:
        host: starts processes; None where that is not possible.
        cache: folder of received files.
        data: folder of the node's own data, if it has some.
        accepts: runs that the node takes part in.
        send: sends a message to the master, from any thread.
        log: shows a message to the user.
    """

    def __init__(
        self,
        host: Host | None,
        cache: Path,
        data: Path | None,
        accepts: Acceptance,
        send: Callable[[Header, Sequence[Buffer]], None],
        log: Callable[[str], None],
    ) -> None:
        self._host, self._data, self._accepts, self._send, self._log = host, data, accepts, send, log
        self._blobs, self._folder = BlobReceiver(cache / "blobs"), cache / RANKS
        self._job: RankJob | None = None
        self._own_folders: list[Path] = []
        self._session: RankSession | None = None
        self._leaving: SimpleQueue[tuple[Header, Sequence[Buffer]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, _: PrepareRank, buffers: Buffers) -> None:
        """Fetch the code and data of a run, and report when they are complete."""
        job = decode_rank_job(buffers[0])
        if job == self._job:
            self._tell_ready()  # requested over an earlier connection
            return
        self._end()
        if objection := self._accepts.objection(job) or ("" if self._host else _NO_TORCH):
            self._log(f"does not take part in {job.title}: {objection}")
            self._put(NotReady(run=job.run, reason=shown(objection)))
            return
        self._job = job
        self._log(f"preparing for {job.title}")
        self._fetch(lambda: self._blobs.request(job.blobs))

    def on_chunk(self, chunk: BlobChunk, data: memoryview) -> None:
        """Write a piece of code or data."""
        if self._job is not None:
            self._fetch(lambda: self._blobs.receive(chunk, data))

    def start(self, header: StartRank, buffers: Buffers) -> None:
        """Start a process for the run; end an earlier one, which counts as lost."""
        job, earlier = self._job, self._session
        if job is None or job.run != header.run or self._host is None:
            return
        if earlier is not None:
            if earlier.process == header.process:
                return
            earlier.close()
        try:
            folder = self._folder_of(job, header.process)
        except OSError as error:
            self._resign(error)
            return
        setup = RankSetup(
            job=job,
            place=decode_rank_place(buffers[0]),
            process=header.process,
            code=self._blobs.path_of(job.code) if job.code else None,
            data=self._data_of(job),
            folder=folder,
            resumes=bool(job.checkpoint),
        )
        self._log(f"starting process {header.process} of {job.title}")
        self._session = RankSession(self._host, setup, self._put, self._log)

    def told(self, header: RankTold, buffers: Buffers) -> None:
        """Relay a message of the coordinator."""
        if self._session is not None and header.process == self._session.process:
            self._session.told(bytes(buffers[0]))

    def stop(self, header: StopRank, _: Buffers) -> None:
        """End the process after its step, or at once."""
        if self._session is not None and header.process == self._session.process:
            self._session.stop(at_once=header.at_once)

    def give(self, fetch: FetchBlob, _: Buffers) -> None:
        """Send the master a piece of a checkpoint."""
        if self._session is not None:
            self._session.give(fetch)

    def release(self, release: Release) -> None:
        """End the part in a run that is over."""
        if self._job is not None and self._job.run == release.run:
            self._log(f"done with {self._job.title}")
            self._end()

    def resend(self) -> None:
        """Send unanswered messages again, over a new connection."""
        if self._job is not None:
            self._fetch(self._blobs.resume)
        if self._session is not None:
            self._session.resend()

    def close(self) -> None:
        """End the process, and the thread."""
        self._end()
        if self._thread is not None:
            self._leaving.put(None)

    def _data_of(self, job: RankJob) -> Path | None:
        """Return the folder of the data: those of the job, or else the node's own, or else those that the command
        named.
        """
        shared = Path(job.data_dir) if job.data_dir else None
        return self._blobs.path_of(job.data) if job.data else shared and (self._data or shared)

    def _fetch(self, action: Callable[[], Sequence[Header]]) -> None:
        """Take a step of the preparation."""
        assert self._job is not None
        was_complete = self._blobs.is_complete and self._session is not None
        try:
            for fetch in action():
                self._put(fetch)
        except (EvenerError, OSError) as error:
            self._resign(error)
            return
        if self._blobs.is_complete and not was_complete:
            self._tell_ready()

    def _folder_of(self, job: RankJob, process: int) -> Path:
        """Make the folder of a process, with the checkpoint to continue from. Raises OSError."""
        folder = self._folder / job.run / str(process)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own_folders.append(folder)
        if job.checkpoint:
            for step in self._blobs.path_of(job.checkpoint).iterdir():
                link_files(step, folder / CHECKPOINTS / step.name)
        return folder

    def _resign(self, error: Exception) -> None:
        """Tell the master that this node cannot take part in the run, and why."""
        assert self._job is not None
        self._log(f"cannot take part in {self._job.title}: {error}")
        self._put(NotReady(run=self._job.run, reason=shown(str(error))))
        self._end()

    def _tell_ready(self) -> None:
        if self._job is not None and self._host is not None and self._blobs.is_complete:
            process = self._session.process if self._session is not None else 0
            self._put(RankReady(run=self._job.run, process=process, speed=self._host.speed))

    def _put(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evener-ranks-send", daemon=True)
            self._thread.start()
        self._leaving.put((header, buffers))

    def _run(self) -> None:
        while (frame := self._leaving.get()) is not None:
            try:
                self._send(*frame)
            except (CannotJoin, ConnectionLost):
                return  # the receiving thread reports it

    def _end(self) -> None:
        """Forget the run."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._blobs.close()
        if self._job is not None:
            for folder in self._own_folders:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                (self._folder / self._job.run).rmdir()  # another node of this machine may have a folder there
            self._own_folders, self._job = [], None
