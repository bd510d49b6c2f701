"""One rank's process on a node; messages between it and the coordinator survive a broken connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from evener.membership.generation import Hello
from evener.membership.shared_values import AskValues, SetValue, Values, decode_from_rank, decode_to_rank
from evener.ps.node.checkpoint_sender import CheckpointSender, SendToMaster
from evener.ps.protocol.messages import FetchBlob, Header
from evener.ps.protocol.rank_messages import RankEnded, RankJob, RankPlace, RankSaid, RankShown
from evener.records.error_kind import ErrorKind, kind_of
from evener.records.errors import first_line
from evener.records.events import decode_events
from evener.records.record import WEIGHTS, Event
from evener.records.schema import shown
from evener.wire.frame import Buffer


class Ending(NamedTuple):
    """The end of a process.

    Attributes:
        has_finished: whether it reported that its work is done.
        kind: kind of the error that it reported; None for none.
        is_own: whether the error arose in this process.
        sentence: sentence of the error.
        clause: clause that says how the process ended.
    """

    has_finished: bool
    kind: ErrorKind | None
    is_own: bool
    sentence: str
    clause: str


class RankSetup(NamedTuple):
    """Parameters of a rank's process.

    Attributes:
        job: job to do.
        place: its place among the ranks.
        process: its number.
        code: folder of the task's files; None for a built-in task.
        data: folder of the data; None if the task knows.
        folder: its own folder.
        resumes: whether it continues from the checkpoint in that folder.
        on_said: called with its messages to the coordinator, in a thread.
        on_shown: called with its events, in a thread.
        on_ended: called with its end, in a thread, after all its messages.
    """

    job: RankJob
    place: RankPlace
    process: int
    code: Path | None
    data: Path | None
    folder: Path
    resumes: bool = False
    on_said: Callable[[bytes], None] = lambda _: None
    on_shown: Callable[[bytes], None] = lambda _: None
    on_ended: Callable[[Ending], None] = lambda _: None


class HostedRank(Protocol):
    """A rank's process on this node."""

    def tell(self, data: bytes) -> None:
        """Send it a message of the coordinator."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """End it after its step, or at once."""
        ...

    def close(self) -> None:
        """End it, if it has not ended; return when it has."""
        ...


class Host(NamedTuple):
    """Starts ranks on this node.

    Attributes:
        start: starts one rank.
        speed: 1, or the fraction to which the node is throttled.
    """

    start: Callable[[RankSetup], HostedRank]
    speed: float


class RankSession:
    """A process, and its messages that the coordinator has not answered; close it.

    Args:
        host: starts the process.
        setup: parameters of the process, without callbacks.
        send: queues a frame for sending, from any thread.
        log: shows a message to the node's user.
    """

    def __init__(self, host: Host, setup: RankSetup, send: SendToMaster, log: Callable[[str], None]) -> None:
        self.process, self._run, self._folder, self._send = setup.process, setup.job.run, setup.folder, send
        self._lock = threading.Lock()
        self._hello = b""
        self._unanswered: dict[int, bytes] = {}
        self._shown: tuple[Header, *tuple[Buffer, ...]] | None = None
        self._ended: tuple[Header, *tuple[Buffer, ...]] | None = None
        self._checkpoints = CheckpointSender(self._run, self.process, self._folder, send, log)
        self._hosted = host.start(
            setup._replace(on_said=self._on_said, on_shown=self._on_shown, on_ended=self._on_ended)
        )

    def told(self, data: bytes) -> None:
        """Relay a message of the coordinator."""
        message = decode_to_rank(data)
        if isinstance(message, Values):
            with self._lock:
                self._unanswered.pop(message.number, None)
        self._hosted.tell(data)

    def stop(self, *, at_once: bool) -> None:
        """End the process after its step, or at once."""
        self._hosted.stop(at_once=at_once)

    def give(self, fetch: FetchBlob) -> None:
        """Send the master a piece of a checkpoint."""
        self._checkpoints.give(fetch)

    def resend(self) -> None:
        """Send unanswered messages again."""
        with self._lock:
            again = [self._hello] if self._hello else []
            again += self._unanswered.values()
            ended, shown = self._ended, self._shown
        for data in again:
            self._send(RankSaid(run=self._run, process=self.process), data)
        self._checkpoints.offer()
        if ended is not None:
            if shown is not None:
                self._send(*shown)  # it may be the record
            self._send(*ended)

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._hosted.close()

    def _on_said(self, data: bytes) -> None:
        message = decode_from_rank(data)
        with self._lock:
            if isinstance(message, Hello):
                self._hello = data
            elif isinstance(message, SetValue | AskValues):
                self._unanswered[message.number] = data
        self._send(RankSaid(run=self._run, process=self.process), data)

    def _on_shown(self, data: bytes) -> None:
        self._shown = (RankShown(run=self._run, process=self.process), data)
        self._send(*self._shown)
        if any(isinstance(event, Event) and event.kind == "checkpoint" for event in decode_events(data)):
            self._checkpoints.written()

    def _on_ended(self, ending: Ending) -> None:
        header = RankEnded(
            run=self._run,
            process=self.process,
            has_finished=ending.has_finished,
            kind=ending.kind,
            is_own=ending.is_own,
            sentence=shown(ending.sentence),
            ending=shown(ending.clause),
        )
        written = self._folder / WEIGHTS
        buffers: tuple[bytes, ...] = ()
        try:
            buffers = (written.read_bytes(),) if written.exists() else ()
        except (OSError, MemoryError) as error:  # else the master would wait for an end that never comes
            sentence = f"the weights of {self._run} cannot be read: {first_line(error)}"
            failure = {"has_finished": False, "kind": kind_of(error), "is_own": True, "sentence": shown(sentence)}
            header = msgspec.structs.replace(header, **failure)
        with self._lock:
            self._ended = (header, *buffers)
        self._send(*self._ended)
