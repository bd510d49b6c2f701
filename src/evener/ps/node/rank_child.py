"""One rank's process on a node; messages between it and the coordinator survive a broken connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evener.launch.parent import Failed, Parent
from evener.launch.processes import RANK_MODULES, LocalProcess, LocalProcesses
from evener.membership.generation import Hello
from evener.membership.shared_values import AskValues, SetValue, Values, decode_from_rank, decode_to_rank
from evener.ps.node.checkpoint_sender import CheckpointSender, SendToMaster
from evener.ps.protocol.messages import FetchBlob, Header
from evener.ps.protocol.rank_messages import RankEnded, RankPlace, RankSaid, RankShown
from evener.records.error_kind import kind_of
from evener.records.errors import Interrupted, first_line
from evener.records.events import RunEvent, decode_events
from evener.records.plan import Plan
from evener.records.record import WEIGHTS, Epoch, Event, TrainRecord
from evener.records.schema import Part, shown
from evener.wire.frame import Buffer

_LOOK_SECONDS = 0.2


class RankTask(Part, frozen=True, kw_only=True):
    """The task of a rank's process.

    Attributes:
        run: name of the run.
        config: of the run, encoded.
        task: name of a built-in task, or the task's file here.
        data: folder of the data; None if the task knows.
        folder: the process's own folder.
        place: its place among the ranks.
        process: its number.
        resumes: whether it continues from the checkpoint in that folder.
        brings_program: whether the file `task` defines what a rank runs.
        towards: host name of the master; the interface towards it also reaches the other ranks.
    """

    run: str
    config: bytes
    task: str
    data: str | None
    folder: str
    place: RankPlace
    process: int
    resumes: bool
    brings_program: bool
    towards: str


class RankHost(NamedTuple):
    """How this node runs ranks.

    Attributes:
        main: function that a rank's process runs.
        speed: 1, or the fraction to which the node is throttled.
        towards: host name of the master.
        open: opens processes that end with this one.
    """

    main: Callable[[Parent, RankTask], None]
    speed: float
    towards: str
    open: Callable[[], LocalProcesses] = partial(LocalProcesses, RANK_MODULES)


class RankChild:
    """A rank's process, and the messages between it and the coordinator; close it.

    Args:
        host: how the process runs.
        task: its task.
        send: queues a frame for sending, from any thread.
        log: shows a message to the node's user.
        offers_last: whether the run may go on from the last checkpoint of a process that was stopped.
    """

    def __init__(
        self,
        host: RankHost,
        task: RankTask,
        send: SendToMaster,
        log: Callable[[str], None],
        *,
        offers_last: bool = False,
    ) -> None:
        self._offers_last = offers_last
        self.process, self._run, self._folder, self._send = task.process, task.run, Path(task.folder), send
        self._main, self._task = host.main, task
        self._lock = threading.Lock()
        self._hello = b""
        self._unanswered: dict[int, bytes] = {}
        self._lasting: dict[type[RunEvent] | int, tuple[Header, *tuple[Buffer, ...]]] = {}
        self._ended: tuple[Header, *tuple[Buffer, ...]] | None = None
        self._checkpoints = CheckpointSender(self._run, self.process, self._folder, send, log)
        self._processes = host.open()  # in this thread: the server ends with the thread that starts it
        self._started = threading.Event()
        self._one: LocalProcess | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._receive, name="evener-rank", daemon=True)
        self._thread.start()

    def told(self, data: bytes) -> None:
        """Relay a message of the coordinator; a process that could not start needs none."""
        message = decode_to_rank(data)
        if isinstance(message, Values):
            with self._lock:
                self._unanswered.pop(message.number, None)
        self._started.wait()
        one = self._one
        if one is not None:
            one.tell(data)  # not under the lock, for the process may read slowly

    def stop(self, *, at_once: bool) -> None:
        """End the process after its step, or at once; do nothing if it has ended."""
        self._started.wait()
        with self._lock:
            if self._one is None:
                return
            if not at_once:
                self._one.request_stop()
            elif not self._one.has_ended:
                self._one.process.kill()

    def carry_on(self) -> None:
        """Let the process ignore a SIGTERM that has reached it and its node together."""
        with self._lock:
            if self._one is not None:
                self._one.carry_on()

    def give(self, fetch: FetchBlob) -> None:
        """Send the master a piece of a checkpoint."""
        self._checkpoints.give(fetch)

    def resend(self) -> None:
        """Send unanswered messages again, and the events without which the others cannot be understood."""
        with self._lock:
            again = [self._hello] if self._hello else []
            again += self._unanswered.values()
            lasting, ended = list(self._lasting.values()), self._ended
        for data in again:
            self._send(RankSaid(run=self._run, process=self.process), data)
        self._checkpoints.offer()
        for message in lasting:
            self._send(*message)
        if ended is not None:
            self._send(*ended)

    def close(self) -> None:
        """End the process, if it has not ended, and wait for its end."""
        self._is_closed = True
        self._thread.join()

    def _receive(self) -> None:
        """Start the process, relay its messages, and report its end, also if this machine cannot start it."""
        try:
            with self._processes as processes:
                place = self._task.place
                one = self._one = processes.start(place.nodes[place.rank].name, self._main, self._task)
                self._started.set()
                try:
                    while not self._is_closed and not (one.has_ended and one.is_drained):
                        for _, data in processes.receive(_LOOK_SECONDS):
                            self._on_shown(data)
                        while one.said:
                            self._on_said(one.said.popleft())
                    has_finished, failed, clause = one.has_finished, one.failure, one.ending
                finally:
                    with self._lock:
                        self._one = None  # it cannot be asked any more once `processes` has closed it
        except Exception as error:  # such as too many processes or open files
            sentence = f"its process could not be run: {first_line(error)}"
            has_finished, failed, clause = False, Failed(True, kind_of(error), sentence), ""
        finally:
            self._started.set()
        if not self._is_closed:
            self._report_end(has_finished, failed, clause)

    def _on_said(self, data: bytes) -> None:
        message = decode_from_rank(data)
        with self._lock:
            if isinstance(message, Hello):
                self._hello = data
            elif isinstance(message, SetValue | AskValues):
                self._unanswered[message.number] = data
        self._send(RankSaid(run=self._run, process=self.process), data)

    def _on_shown(self, data: bytes) -> None:
        message, events = (RankShown(run=self._run, process=self.process), data), decode_events(data)
        with self._lock:
            self._lasting |= {type(event): message for event in events if isinstance(event, Plan | TrainRecord)}
            self._lasting |= {event.epoch: message for event in events if isinstance(event, Epoch)}
        self._send(*message)
        if any(isinstance(event, Event) and event.kind == "checkpoint" for event in events):
            self._checkpoints.written()

    def _report_end(self, has_finished: bool, failed: Failed | None, clause: str) -> None:
        written = self._folder / WEIGHTS
        buffers: tuple[bytes, ...] = ()
        try:
            buffers = (written.read_bytes(),) if written.exists() else ()
        except (OSError, MemoryError) as error:  # else the master would wait for an end that never comes
            sentence = f"the weights of {self._run} cannot be read: {first_line(error)}"
            has_finished, failed = False, Failed(True, kind_of(error), sentence)
        header = RankEnded(
            run=self._run,
            process=self.process,
            has_finished=has_finished,
            kind=None if failed is None else failed.kind,
            is_own=failed is not None and failed.is_own,
            sentence="" if failed is None else shown(failed.sentence),
            ending=shown(clause),
        )
        if self._offers_last and failed is not None and isinstance(failed.kind.as_error(""), Interrupted):
            self._checkpoints.written(is_last=True)
        with self._lock:
            self._ended = (header, *buffers)
        self._send(*self._ended)
