"""A node: joins a master, prepares for each run, and computes its leases, until it is dismissed.

    Join -> Welcome -> measure the device -> Profiled
    Prepare, BlobChunk, ServerReply, Validate -> the session of a run (worker_session)
    PrepareRank, StartRank, RankTold -> a rank of a run whose ranks work together (node_ranks)
    Release -> the session ends
    Dismiss -> the node ends

One thread does all this; it reads the next frame when it has handled the last one. Another thread sends heartbeats, and
reconnects when the connection breaks (reconnecting_client).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from evener.ps.node.node_examination import NodeExaminer
from evener.ps.node.node_ranks import NodeRanks
from evener.ps.node.reconnecting_client import Dial, Inbox, ReconnectingClient, RunEnded, ThreadedInbox
from evener.ps.node.worker_session import NodeConfig, WorkerSession
from evener.ps.protocol.examination_messages import Examine, ProbeNodes
from evener.ps.protocol.job import decode_job
from evener.ps.protocol.messages import (
    PROTOCOL,
    BlobChunk,
    Dismiss,
    FetchBlob,
    Header,
    Heartbeat,
    Join,
    Leave,
    NotReady,
    Prepare,
    Profiled,
    Quarantine,
    Release,
    ServerReply,
    Validate,
    Welcome,
)
from evener.ps.protocol.rank_messages import PrepareRank, RankTold, StartRank, StopRank
from evener.records.errors import EvenerError, NodeLost, place_of, words_of
from evener.records.profile import DeviceProfile
from evener.records.schema import shown
from evener.system.sign_of_life import sign_of_life
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Buffer, Frame

Buffers = tuple[memoryview, ...]
"""Buffers of a frame."""


class Node:
    """One node.

    Args:
        config: configuration of the node.
        dial: connects to the master within a number of seconds, with this patience.
        log: shows a message to the user.

    Raises:
        CannotJoin: the master cannot be reached.
    """

    def __init__(self, config: NodeConfig, dial: Dial, log: Callable[[str], None]) -> None:
        self._config, self._log, self._name = config, log, config.name
        self._incarnation = time.time_ns() // 10**6
        self._profile: DeviceProfile | None = None
        self._session: WorkerSession | None = None
        self._steps = 0
        self._handlers: dict[type[Header], Callable[[Any, Buffers], None]] = {
            ServerReply: self._on_reply,
            Validate: self._on_validate,
            Welcome: self._on_welcome,
            Prepare: self._on_prepare,
            BlobChunk: self._on_chunk,
            Release: self._on_release,
            Quarantine: self._on_quarantine,
        }
        self._client = ReconnectingClient(dial, self._introduction, self._heartbeat, self._log_break)
        self._examiner = NodeExaminer(config.look, config.cache, config.accepts, self._client.send)
        self._handlers |= {Examine: self._examiner.examine, ProbeNodes: self._examiner.probe}
        self._ranks = NodeRanks(config.host, config.cache, config.data, config.accepts, self._client.send, log)
        self._handlers |= {
            PrepareRank: self._on_prepare_rank,
            StartRank: self._ranks.start,
            StopRank: self._ranks.stop,
            RankTold: self._ranks.told,
            FetchBlob: self._ranks.give,
        }
        self._inbox: Inbox | ThreadedInbox = Inbox(self._client, self._aside)

    def serve(self) -> None:
        """Run the node until the master dismisses it.

        Raises:
            NodeLost: the master rejects this node, with the reason.
        """
        try:
            while True:
                frame = self._inbox.receive()
                if isinstance(frame.header, Dismiss):
                    return self._on_dismiss(frame.header)
                handle = self._handlers.get(type(frame.header))
                if handle is not None:
                    handle(frame.header, frame.buffers)
                self._work()
        except ConnectionLost as error:
            if not self._client.is_over:
                raise
            self._log(str(error))
        except KeyboardInterrupt:
            self._client.send_last(Leave())
            raise
        finally:
            self._examiner.close()
            self._end_session()
            self._ranks.close()
            self._client.close()
            self._inbox.close()

    def _aside(self, frame: Frame[Header]) -> bool:
        """Handle a frame that does not disturb the work, and need not wait for its end; return whether it was one."""
        if not isinstance(frame.header, Examine | ProbeNodes):
            return False
        self._handlers[type(frame.header)](frame.header, frame.buffers)
        return True

    def _work(self) -> None:
        """Work on the leases, one at a time, until a frame arrives or none is left."""
        while self._session is not None and self._session.can_work:
            if not self._attempt(self._session.work):
                return

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Call an action of the run, and return whether it succeeded; a failure ends this node's part in the run."""
        try:
            action(*arguments)
        except RunEnded:
            return False
        except NodeLost:  # a lost connection is no failure of the task
            raise
        except Exception as error:
            self._resign(error)
            return False
        return True

    def _resign(self, error: Exception) -> None:
        """Tell the master that this node cannot take part in the run, and why."""
        assert self._session is not None
        job, reason = self._session.job, shown(explain(error))
        self._log(f"cannot take part in {job.title}: {reason}")
        self._end_session()
        self._send(NotReady(run=job.run, reason=reason))

    def _on_welcome(self, welcome: Welcome, _: Buffers) -> None:
        self._client.patience = welcome.patience
        if welcome.name not in ("", self._name):
            self._name = welcome.name
            self._log(f"the name {self._config.name} belongs to another node: this node is named {self._name}")
        for remark in welcome.remarks:
            self._log(f"warning: {remark}")
        if self._profile is None:
            self._log(f"joined as {self._name}; measuring this machine")
            with sign_of_life(self._log, "measuring this machine"):
                self._profile = self._config.measure()
            self._send(Profiled(profile=self._profile))
            self._log("measured; ready for runs, until Ctrl-C")
        if self._session is not None:
            self._session.resend()
        self._ranks.resend()

    def _on_prepare(self, _: Prepare, buffers: Buffers) -> None:
        job = decode_job(buffers[0])
        if self._session is not None and self._session.job.run == job.run:
            return  # requested over an earlier connection
        self._end_session()
        if objection := self._config.accepts.objection(job):
            self._log(f"does not take part in {job.title}: {objection}")
            self._send(NotReady(run=job.run, reason=shown(objection)))
            return
        self._log(f"preparing for {job.title}")
        if job.agreement.is_overlapped and isinstance(self._inbox, Inbox):
            self._inbox = ThreadedInbox(self._client, self._inbox.waiting, self._aside)
        self._session = WorkerSession(job, self._config, self._send, self._between_steps)
        with sign_of_life(self._log, f"preparing for {job.title}"):
            self._advance(self._session, self._session.start)

    def _on_prepare_rank(self, header: PrepareRank, buffers: Buffers) -> None:
        self._end_session()
        self._ranks.prepare(header, buffers)

    def _on_chunk(self, chunk: BlobChunk, buffers: Buffers) -> None:
        if self._session is not None:
            with sign_of_life(self._log, f"preparing for {self._session.job.title}"):
                self._advance(self._session, self._session.on_chunk, chunk, buffers[0])
        else:
            self._ranks.on_chunk(chunk, buffers[0])

    def _advance(self, session: WorkerSession, action: Callable[..., None], *arguments: Any) -> None:
        """Take a step of the preparation."""
        was_ready = session.is_ready
        if self._attempt(action, *arguments) and session.is_ready and not was_ready:
            self._log(f"ready for {session.job.title}")

    def _on_reply(self, reply: ServerReply, buffers: Buffers) -> None:
        if self._session is not None and reply.run == self._session.job.run:
            self._session.on_reply(reply, buffers[0] if buffers else None)

    def _on_validate(self, request: Validate, buffers: Buffers) -> None:
        if self._session is not None and request.run == self._session.job.run:
            self._attempt(self._session.validate, request, buffers[0])

    def _on_quarantine(self, quarantine: Quarantine, _: Buffers) -> None:
        self._log(f"excluded: {quarantine.reason}; the master uses this node again in {quarantine.seconds:.3g} s")
        if self._session is not None:
            self._session.drop_leases()

    def _on_release(self, release: Release, _: Buffers) -> None:
        if self._session is not None and self._session.job.run == release.run:
            self._log(f"done with {self._session.job.title}")
            self._end_session()
        self._ranks.release(release)

    def _on_dismiss(self, dismiss: Dismiss) -> None:
        if dismiss.is_error:
            raise NodeLost(f"the master refuses node {self._name}: {dismiss.reason}")
        self._log(f"dismissed by the master: {dismiss.reason}")

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _between_steps(self) -> None:
        self._steps += 1
        self._inbox.check_run()

    def _send(self, header: Header, *buffers: Buffer) -> None:
        self._inbox.send(header, buffers)

    def _introduction(self) -> Join:
        config, session = self._config, self._session
        return Join(
            protocol=PROTOCOL,
            name=self._name,
            incarnation=self._incarnation,
            evener=config.versions.evener,
            python=config.versions.python,
            torch=config.versions.torch,
            clock=time.time(),
            device=config.device,
            run=session.job.run if session is not None and session.is_ready else "",
            profile=self._profile,
            key=config.key,
            is_named=config.is_named,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(peak_memory_bytes=_peak_memory(), steps=self._steps)

    def _log_break(self, why: str) -> None:
        self._log(f"{why}; reconnecting to the master" if why else "reconnected to the master")


def explain(error: Exception) -> str:
    """Describe an error in one sentence."""
    if isinstance(error, EvenerError):
        return str(error)
    return f"{words_of(error)}{place_of(error)}"


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
