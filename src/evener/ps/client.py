"""A command's connection to a master: query it, end it, submit runs and follow them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType

from evener.agreements.layout import Flat
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.directions import ToCommand
from evener.ps.protocol.examination_messages import (
    Examination,
    ExamineNodes,
    NodesExamined,
    TaskQuestion,
    decode_part,
    encode_part,
)
from evener.ps.protocol.job import Job, encode_job
from evener.ps.protocol.messages import (
    MASTER_ENDED,
    AssignNodes,
    ExpelNode,
    FetchBlob,
    ForgetNode,
    GetStatus,
    Header,
    Invite,
    Invited,
    Refused,
    ReleaseNode,
    RevokeInvitation,
    RunAccepted,
    RunEvents,
    RunFinished,
    RunRejected,
    ShutDown,
    StatusReply,
    StopRun,
    SubmitRun,
    WatchRun,
)
from evener.ps.protocol.rank_messages import RankJob, encode_rank_part
from evener.ps.protocol.run_result import RunResult
from evener.ps.protocol.status import ClusterStatus, decode_status
from evener.records.errors import InvalidInput, NodeLost
from evener.records.events import RunEvent, decode_events
from evener.records.record import Event
from evener.system.signals import requests_to_stop
from evener.wire.connect import backoff, open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import Buffer, Frame
from evener.wire.identity import Address, Token, with_port
from evener.wire.limits import Limits

_CHECK_SECONDS = 0.5
_RETURN = 8
"""Patiences within which a lost master has to come back."""


def find_master(home: StateDir, address: str | None, token: str | None) -> tuple[Address, Token, float]:
    """Return address, token and patience of the named master, or of the master of `home`.

    Raises:
        InvalidInput: only one of address and token is set, or no master is found.
    """
    if (address is None) != (token is None):
        raise InvalidInput(
            "--master ADDRESS and --token-file FILE belong together; for the master of this machine leave both out "
            "(with `evener train`, name its folder by --home)"
        )
    if address is not None and token is not None:
        return Address.parse(with_port(address)), Token.parse(token), Limits().patience
    beacon = home.beacon()
    # On its own machine a master is reached through the bound address, even if the machine's address has changed.
    bound = Address.parse(beacon.listen)
    here = bound if bound.path or bound.is_everywhere else Address.parse(beacon.address)
    return here, Token.parse(beacon.token), beacon.patience


class MasterClient:
    """A command's connection to a master; close it.

    Args:
        address: address of the master.
        token: token to prove.
        patience: seconds of silence after which the master counts as lost.

    Attributes:
        patience: see above.

    Raises:
        CannotJoin: the master cannot be reached, or refuses the connection.
    """

    def __init__(self, address: Address, token: Token, patience: float) -> None:
        self._address, self._token, self.patience = address, token, patience
        self._is_stopping = False
        self._refusal: InvalidInput | None = None
        self._unread: deque[Frame[Header]] = deque()
        self._connection = self._dial()
        self._received = time.monotonic()

    def ask(self) -> ClusterStatus:
        """Return the state of the master."""
        self._send(GetStatus())
        return decode_status(self._await(StatusReply).buffers[0])

    def change(self, message: ExpelNode | ForgetNode | ReleaseNode | RevokeInvitation | StopRun) -> ClusterStatus:
        """Send a request; return the state afterwards. Raises InvalidInput: the master refuses, and says why."""
        self._send(message)
        return decode_status(self._await(StatusReply).buffers[0])

    def invite(self, message: Invite) -> Invited:
        """Return a token for other users. Raises InvalidInput: the master refuses, and says why."""
        self._send(message)
        invited = self._await(Invited).header
        assert isinstance(invited, Invited)
        return invited

    def examine(self, seconds: float, question: TaskQuestion | None = None, code: bytes = b"") -> Examination:
        """Examine all nodes and the links between them, within so many seconds.

        Raises:
            InvalidInput: the master refuses, and says why.
        """
        self._send(ExamineNodes(seconds=seconds), (encode_part(question), code) if question else ())
        frame = self._await(NodesExamined)
        assert isinstance(frame.header, NodesExamined)
        if frame.header.reason:
            raise InvalidInput(frame.header.reason)
        return decode_part(frame.buffers[0], Examination)

    def down(self) -> None:
        """End the master and its nodes; return when the master has confirmed its end.

        Raises:
            InvalidInput: this token does not allow it.
            ConnectionLost: the connection broke before the confirmation.
        """
        self._send(ShutDown())
        self._await(StatusReply)
        try:
            while True:
                self._connection.receive()
        except ConnectionLost as error:
            if error.peer_reason != MASTER_ENDED:
                raise

    def submit(self, job: Job | RankJob, weights: Flat | None, blobs: Sequence[Blob]) -> str:
        """Submit a run; return its name when the master has the run and all its blobs.

        Args:
            job: job to do.
            weights: initial weights; None where the ranks make them.
            blobs: code and data.

        Raises:
            InvalidInput: the master refuses the run, and says why.
        """
        self.ask()  # a token that does not allow to submit runs is refused before the weights are sent
        sender = BlobSender(blobs=blobs)
        if isinstance(job, RankJob):
            self._send(SubmitRun(), [encode_rank_part(job)])
        else:
            assert weights is not None
            self._send(SubmitRun(), [encode_job(job), weights.memory])
        while not isinstance((header := self._await(RunAccepted, RunRejected, FetchBlob).header), RunAccepted):
            if isinstance(header, RunRejected):
                raise InvalidInput(header.reason)
            assert isinstance(header, FetchBlob)
            chunk, data = sender.chunk(header)
            self._send(chunk, [data])
        return header.run

    def assign(self, run: str, nodes: Sequence[str]) -> None:
        """Assign these nodes to a run from now on; without nodes, the run is paused.

        Raises:
            InvalidInput: the nodes work for another run, or there is no such run.
        """
        self._send(AssignNodes(run=run, nodes=tuple(nodes)))
        if isinstance(header := self._await(RunAccepted, RunRejected).header, RunRejected):
            raise InvalidInput(header.reason)

    def follow(self, runs: Sequence[str]) -> None:
        """Subscribe to these runs over a new connection; `news` returns their messages."""
        for run in runs:
            self._send(WatchRun(run=run))
            self.ask()  # when that is answered, so is the other

    def news(self, timeout: float) -> Frame[Header] | None:
        """Return the next message about a run that was submitted or is followed over this connection: its events, its
        end, or that there is no such run. Return None if none arrives within `timeout` seconds.

        Raises:
            ConnectionLost: the master is gone, or has been silent for the patience.
        """
        if self._unread:
            return self._unread.popleft()
        if not self._connection.wait(timeout):
            if self._is_patient():
                return None
            raise ConnectionLost(f"the master stopped responding (silent for {self.patience:g} s)")
        frame = self._accepted(self._connection.receive())
        self._received = time.monotonic()
        return frame if _is_news(frame) else None

    def watch(self, run: str, on_event: Callable[[RunEvent], None], check: Callable[[], None]) -> RunResult:
        """Follow a run until it is over, even if the master is killed and restarted.

        Ctrl-C asks the master to end the run; a second one ends this command.

        Args:
            run: name of the run.
            on_event: called with every event.
            check: called regularly; may raise.

        Raises:
            NodeLost: the master is gone and does not come back.
            InvalidInput: the restarted master does not know the run.
        """
        while True:
            try:
                return self._watch(run, on_event, check)
            except ConnectionLost as error:
                on_event(Event(step=0, kind="master lost", message=str(error)))
                self.find_again([run], error)
                if self._is_stopping:
                    self._send_stop(run)

    def _watch(self, run: str, on_event: Callable[[RunEvent], None], check: Callable[[], None]) -> RunResult:
        earlier = int(self._is_stopping)
        with requests_to_stop() as requests:
            while True:
                check()
                self._obey(earlier + len(requests), run)
                if (frame := self.news(_CHECK_SECONDS)) is None:
                    continue
                if isinstance(frame.header, RunEvents):
                    for event in decode_events(frame.buffers[0]):
                        on_event(event)
                elif isinstance(frame.header, RunRejected):
                    raise InvalidInput(frame.header.reason)
                elif isinstance(frame.header, RunFinished):
                    record, weights = (bytes(buffer) for buffer in frame.buffers) if frame.buffers else (b"", b"")
                    return RunResult(frame.header.kind, frame.header.reason, record, weights)

    def _obey(self, requests: int, run: str) -> None:
        """Stop the run at the first Ctrl-C; end this command at the second."""
        if requests > 1:
            raise KeyboardInterrupt
        if requests and not self._is_stopping:
            self._is_stopping = True
            self._send_stop(run)

    def _send_stop(self, run: str) -> None:
        with contextlib.suppress(ConnectionLost):  # watching will notice
            self._send(StopRun(run=run))

    def find_again(self, runs: Sequence[str], why: ConnectionLost) -> None:
        """Reconnect to a master that is restarted, and follow these runs there.

        Raises:
            NodeLost: the master does not come back.
            InvalidInput: the master rejects this token now.
        """
        if self._refusal is not None:
            raise self._refusal
        until = time.monotonic() + _RETURN * self.patience
        for pause in backoff(Random()):
            time.sleep(pause)
            try:
                self._connection.close()
                self._connection = self._dial()
                self._unread.clear()
                self.follow(runs)
            except (CannotJoin, ConnectionLost) as error:
                if time.monotonic() > until:
                    raise NodeLost(
                        f"{why}, and it does not come back ({error}); "
                        f"`evener up` in its state folder continues run {', '.join(runs)}"
                    ) from error
            else:
                self._received = time.monotonic()
                return

    def _dial(self) -> Connection[Header]:
        return open_connection(self._address, self._token, ToCommand, Limits(patience=self.patience))

    def _is_patient(self) -> bool:
        return time.monotonic() - self._received < self.patience

    def _await(self, *kinds: type[Header]) -> Frame[Header]:
        while not isinstance((frame := self._accepted(self._connection.receive())).header, kinds):
            if _is_news(frame):
                self._unread.append(frame)
        return frame

    def _send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame. Raises InvalidInput: the master has refused an earlier one, and closed the connection."""
        try:
            self._connection.send(header, buffers)
        except ConnectionLost as error:
            for unread in error.unread:
                self._require_accepted(unread)
            raise

    def _accepted(self, frame: Frame[Header]) -> Frame[Header]:
        self._require_accepted(frame.header)
        return frame

    def _require_accepted(self, header: object) -> None:
        """Raise InvalidInput if `header` says that something is not done."""
        if isinstance(header, Refused):
            refusal = InvalidInput(header.reason)
            if header.is_final:
                self._refusal = refusal
            raise refusal

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()


def _is_news(frame: Frame[Header]) -> bool:
    header = frame.header
    return isinstance(header, RunEvents | RunFinished) or (isinstance(header, RunRejected) and bool(header.run))
