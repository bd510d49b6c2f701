"""A node: joins a master, makes ready for whatever run there is, computes what it is leased, until it is told to go.

    Join -> Welcome -> measure the device -> Profiled
    Prepare -> fetch code and data -> make the engine -> Ready
    Told    -> work -> Contribution                       (employment.py)
    Assess  -> Assessed
    Release -> forget the run
    Farewell -> end

One thread does all this; it reads the next frame when it has done what the last one asked for. Another one beats, so
that the master knows that the node lives, and finds the master again when the connection breaks (line.py).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

from evener.errors import EvenerError, NodeLost
from evener.profile import DeviceProfile
from evener.ps.blob_transfer import BlobReceiver
from evener.ps.inbox import Inbox, RunEnded, ThreadedInbox
from evener.ps.job import Job, decode_job
from evener.ps.messages import (
    PROTOCOL,
    BlobChunk,
    Dismiss,
    Header,
    Heartbeat,
    Join,
    Leave,
    NotReady,
    Prepare,
    Profiled,
    Quarantine,
    Ready,
    Release,
    ServerReply,
    Validate,
    Welcome,
)
from evener.ps.node_config import NodeConfig, setup_for
from evener.ps.reconnecting_client import Dial, ReconnectingClient
from evener.ps.worker_session import WorkerSession
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Frame


class Node:
    """One node.

    Args:
        abilities: what it is and has.
        dial: makes a connection to the master within the seconds given, with this patience.
        say: tells the user.

    Raises:
        CannotJoin: the master cannot be reached.
    """

    def __init__(
        self,
        abilities: NodeConfig,
        dial: Dial,
        say: Callable[[str], None],
    ) -> None:
        self._abilities, self._say = abilities, say
        self._incarnation = time.time_ns() // 10**6
        self._profile: DeviceProfile | None = None
        self._job: Job | None = None
        self._employment: WorkerSession | None = None
        self._receiver = BlobReceiver(abilities.cache / "blobs")
        self._steps = 0
        self._line = ReconnectingClient(dial, self._introduce, self._beat, self._report_break)
        self._inbox: Inbox | ThreadedInbox = Inbox(self._line)

    def serve(self) -> None:
        """Be a node until the master says goodbye.

        Raises:
            NodeLost: the master refuses this node, with the reason.
        """
        try:
            while True:
                frame = self._inbox.next()
                if isinstance(frame.header, Dismiss):
                    return self._part(frame.header)
                self._handle(frame)
                self._work()
        except ConnectionLost as error:
            if not self._line.has_ended_for_good:
                raise
            self._say(str(error))
        except KeyboardInterrupt:
            self._line.say_last(Leave())
            raise
        finally:
            self._forget()
            self._line.close()
            self._inbox.close()

    def _introduce(self) -> Join:
        own, employment = self._abilities, self._employment
        return Join(
            protocol=PROTOCOL,
            name=own.name,
            incarnation=self._incarnation,
            evener=own.versions.evener,
            python=own.versions.python,
            torch=own.versions.torch,
            clock=time.time(),
            device=own.device,
            run=employment.job.run if employment else "",
            profile=self._profile,
        )

    def _beat(self) -> Heartbeat:
        return Heartbeat(peak_memory_bytes=_peak_memory(), steps=self._steps)

    def _report_break(self, why: str) -> None:
        self._say(f"{why}; looking for the master" if why else "the master is there again")

    def _part(self, farewell: Dismiss) -> None:
        if farewell.is_error:
            raise NodeLost(f"the master refuses node {self._abilities.name}: {farewell.reason}")
        self._say(f"the master says goodbye: {farewell.reason}")

    def _handle(self, frame: Frame[Header]) -> None:
        header, buffers = frame.header, frame.buffers
        if isinstance(header, ServerReply):
            self._on_told(header, buffers[0] if buffers else None)
        elif isinstance(header, Validate):
            self._on_assess(header, buffers[0])
        elif isinstance(header, Welcome):
            self._on_welcome(header)
        elif isinstance(header, Prepare):
            self._on_prepare(buffers[0])
        elif isinstance(header, BlobChunk):
            self._on_chunk(header, buffers[0])
        elif isinstance(header, Release):
            self._on_release(header)
        elif isinstance(header, Quarantine):
            self._on_bench(header)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._line.patience = welcome.patience
        for remark in welcome.remarks:
            self._say(f"warning: {remark}")
        if self._profile is None:
            self._profile = self._abilities.measure()
            self._inbox.send(Profiled(profile=self._profile))
        for fetch in self._receiver.resume():
            self._inbox.send(fetch)
        if self._employment is not None:
            self._employment.resend(self._inbox)

    def _on_prepare(self, data: memoryview) -> None:
        job = decode_job(data)
        if self._job is not None and self._job.run == job.run:
            return  # it was asked for over an earlier connection
        self._forget()
        self._job = job
        self._say(f"preparing for {job.title}")
        for fetch in self._receiver.request(job.blobs):
            self._inbox.send(fetch)
        self._begin_if_complete()

    def _on_chunk(self, chunk: BlobChunk, data: memoryview) -> None:
        try:
            for fetch in self._receiver.receive(chunk, data):
                self._inbox.send(fetch)
        except (EvenerError, OSError) as error:
            self._resign(error)
            return
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        """Make the engine once code and data are here."""
        job = self._job
        if job is None or self._employment is not None or not self._receiver.is_complete:
            return
        try:
            engine = self._abilities.build(setup_for(job, self._abilities, self._receiver, self._look_up))
            unit_seconds = engine.unit_seconds()
        except Exception as error:
            self._resign(error)
            return
        self._employment = WorkerSession(job, engine)
        if job.agreement.is_overlapped and isinstance(self._inbox, Inbox):
            self._inbox = ThreadedInbox(self._line)
        self._say(f"ready for {job.title}")
        self._inbox.send(Ready(run=job.run, unit_seconds=unit_seconds))

    def _look_up(self) -> None:
        self._steps += 1
        self._inbox.look_up()

    def _on_told(self, told: ServerReply, image: memoryview | None) -> None:
        if self._employment is not None and told.run == self._employment.job.run:
            self._employment.hear(told, image)

    def _on_assess(self, asked: Validate, weights: memoryview) -> None:
        if self._employment is None or asked.run != self._employment.job.run:
            return
        try:
            self._inbox.send(self._employment.validate(asked, weights))
        except RunEnded:
            pass
        except Exception as error:
            self._resign(error)

    def _work(self) -> None:
        """Do what there is to do, a lease at a time, until the next frame is needed or waits."""
        while self._employment is not None and self._employment.can_work:
            try:
                self._employment.work(self._inbox)
            except RunEnded:
                return
            except Exception as error:
                self._resign(error)

    def _on_bench(self, bench: Quarantine) -> None:
        self._say(f"benched for {bench.seconds:.3g} s: {bench.reason}")
        if self._employment is not None:
            self._employment.drop_leases()

    def _on_release(self, release: Release) -> None:
        if self._job is not None and self._job.run == release.run:
            self._say(f"done with {self._job.title}")
            self._forget()

    def _resign(self, error: Exception) -> None:
        """Say that this node cannot take part in the run, and why; wire's own errors go on."""
        if isinstance(error, NodeLost):
            raise error
        assert self._job is not None
        run, reason = self._job.run, explain(error)
        self._say(f"cannot take part in {self._job.title}: {reason}")
        self._forget()
        self._inbox.send(NotReady(run=run, reason=reason))

    def _forget(self) -> None:
        """Let go of the job."""
        self._receiver.close()
        self._job = None
        if self._employment is not None:
            self._employment.close()
            self._employment = None


def explain(error: Exception) -> str:
    """What went wrong, in one sentence."""
    if isinstance(error, EvenerError):
        return str(error)
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _peak_memory() -> int:
    """Bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
