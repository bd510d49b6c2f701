"""A node's part in a run whose ranks work together: it starts a process, and relays its messages.

    PrepareRank -> fetch code and data -> RankReady
    StartRank -> a process -> RankSaid, RankShown ->    -> RankTold -> the process
    a checkpoint is written -> RankSaved -> FetchBlob -> RankPiece
    the process ends -> RankEnded

A thread sends the process's messages from a queue, so an absent master does not slow the computation.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from evener.ps.node.checkpoint_sender import CHECKPOINTS, SendToMaster, link_files
from evener.ps.node.node_part import Buffers, NodeConfig, NodePart
from evener.ps.node.rank_child import RankChild, RankTask
from evener.ps.protocol.config import RANKS
from evener.ps.protocol.messages import FetchBlob, Header
from evener.ps.protocol.rank_messages import RankJob, RankReady, RankTold, StartRank, StopRank, decode_rank_place
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import Buffer


class RankPart(NodePart):
    """The rank of this node in one run, whose process may be replaced; close it.

    Args:
        job: job to do.
        config: configuration of the node, which can start ranks.
        send: sends a message to the master, from any thread.
        log: shows a message to the user.
    """

    job: RankJob

    def __init__(self, job: RankJob, config: NodeConfig, send: SendToMaster, log: Callable[[str], None]) -> None:
        super().__init__(job, config, self._put)
        assert config.host is not None
        self._host, self._send_now, self._log = config.host, send, log
        self._folder = config.cache / RANKS / job.run
        self._own_folders: list[Path] = []
        self._child: RankChild | None = None
        self._leaving: SimpleQueue[tuple[Header, Sequence[Buffer]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.handlers = {
            StartRank: self.start_rank,
            StopRank: self.stop_rank,
            RankTold: self.tell_rank,
            FetchBlob: self.give,
        }

    @property
    def is_prepared(self) -> bool:
        """Whether there is a process."""
        return self._child is not None

    def on_complete(self) -> None:
        """Report that a process can be started, or which one there is."""
        process = self._child.process if self._child is not None else 0
        self._put(RankReady(run=self.job.run, process=process, speed=self._host.speed))

    def repeat_ready(self) -> None:
        """Report it again, over a new connection, if code and data are complete."""
        if self._blobs.can_begin:
            self.on_complete()

    def start_rank(self, header: StartRank, buffers: Buffers) -> None:
        """Start a process for the run; end an earlier one, which counts as lost. Raises OSError."""
        earlier = self._child
        if earlier is not None:
            if earlier.process == header.process:
                return
            earlier.close()
        task = RankTask(
            run=self.job.run,
            config=self.job.config,
            task=str(self.code / self.job.task) if self.code else self.job.task,
            data=None if self.data is None else str(self.data),
            folder=str(self._folder_of(header.process)),
            place=decode_rank_place(buffers[0]),
            process=header.process,
            resumes=bool(self.job.checkpoint),
            brings_program=self.job.brings_program,
            towards=self._host.towards,
        )
        self._log(f"starting process {header.process} of {self.job.title}")
        offers_last = self.job.nodes is not None
        self._child = RankChild(self._host, task, self._put, self._log, offers_last=offers_last)

    def tell_rank(self, header: RankTold, buffers: Buffers) -> None:
        """Relay a message of the coordinator."""
        if self._child is not None and header.process == self._child.process:
            self._child.told(bytes(buffers[0]))

    def stop_rank(self, header: StopRank, _: Buffers) -> None:
        """End the process after its step, or at once."""
        if self._child is not None and header.process == self._child.process:
            self._child.stop(at_once=header.at_once)

    def carry_on(self) -> None:
        """Let the process finish its step, though a SIGTERM may have reached it, too."""
        if (session := self._child) is not None:
            session.carry_on()

    def give(self, fetch: FetchBlob, _: Buffers) -> None:
        """Send the master a piece of a checkpoint."""
        if self._child is not None:
            self._child.give(fetch)

    def resend(self) -> None:
        """Send unanswered messages again, over a new connection."""
        super().resend()
        if self._child is not None:
            self._child.resend()

    def close(self) -> None:
        """End the process, remove its files, and end the thread when it has sent what it has."""
        if self._child is not None:
            self._child.close()
        super().close()
        for folder in self._own_folders:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            self._folder.rmdir()  # another node of this machine may have a folder there
        self._leaving.put(None)

    def _folder_of(self, process: int) -> Path:
        """Make the folder of a process, with the checkpoint to continue from. Raises OSError."""
        folder = self._folder / str(process)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own_folders.append(folder)
        if self.job.checkpoint:
            for step in self._blobs.path_of(self.job.checkpoint).iterdir():
                link_files(step, folder / CHECKPOINTS / step.name)
        return folder

    def _put(self, header: Header, *buffers: Buffer) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_queued, name="evener-ranks-send", daemon=True)
            self._thread.start()
        self._leaving.put((header, buffers))

    def _send_queued(self) -> None:
        while (frame := self._leaving.get()) is not None:
            header, buffers = frame
            try:
                self._send_now(header, *buffers)
            except (CannotJoin, ConnectionLost):
                return  # the receiving thread reports it
