"""A node: joins a master, prepares for each run, and computes its leases, until it is dismissed.

    Join -> Welcome -> measure the device -> Profiled
    Prepare -> the part in a run of an agreement (lease_part)
    PrepareRank -> a rank of a run whose ranks work together (rank_part)
    BlobChunk, and the other messages of a run -> the part in that run
    Release -> that part ends
    Dismiss -> the node ends

One thread does all this; it reads the next frame when it has handled the last one. In a run whose exchanges overlap
with work, or that reads data before all have come, two others receive and send. Another one sends heartbeats, and
reconnects when the connection breaks (reconnecting_client).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evener.ps.node.departure import Departure
from evener.ps.node.lease_part import LeasePart
from evener.ps.node.node_examination import NodeExaminer
from evener.ps.node.node_part import Buffers, Handler, NodeConfig, NodePart
from evener.ps.node.rank_part import RankPart
from evener.ps.node.reconnecting_client import Dial, Inbox, ReconnectingClient, RunEnded, ThreadedInbox
from evener.ps.protocol.examination_messages import Examine, ProbeNodes
from evener.ps.protocol.job import Job, decode_job
from evener.ps.protocol.messages import (
    PROTOCOL_VERSION,
    BlobChunk,
    Dismiss,
    FetchFrom,
    GiveNotice,
    Header,
    Heartbeat,
    Join,
    Leave,
    NotReady,
    Prepare,
    Profiled,
    Quarantine,
    Release,
    Welcome,
)
from evener.ps.protocol.rank_messages import PrepareRank, RankJob, decode_rank_job
from evener.records.error_kind import kind_of
from evener.records.errors import DeviceLost, EvenerError, NodeLost, end_process, ended_by_itself, place_of, words_of
from evener.records.profile import DeviceProfile
from evener.records.schema import shown
from evener.system.device_failures import device_lost, explained_failure
from evener.system.host import has_posix
from evener.system.memory import peak_memory
from evener.system.sign_of_life import sign_of_life
from evener.system.signals import stop_signals_call
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Buffer, Frame

if TYPE_CHECKING:
    from evener.system.device_watch import DeviceWatch  # imports PyTorch

_NO_TORCH = "its ranks need PyTorch, which this node does not have or must not use"
_SMALLER_BATCH = "use a smaller --batch-size"
_NO_POSIX = "its ranks need Linux or macOS; on other systems nodes work under an agreement, such as --agreement sync"


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
        self._run: LeasePart | RankPart | None = None
        self._steps = 0
        self._watch: DeviceWatch | None = None
        self._handlers: dict[type[Header], Handler] = {
            Welcome: self._on_welcome,
            Prepare: self._on_prepare,
            PrepareRank: self._on_prepare_rank,
            BlobChunk: self._on_chunk,
            FetchFrom: self._on_fetch_from,
            Release: self._on_release,
            Quarantine: self._on_quarantine,
        }
        self._client = ReconnectingClient(dial, self._introduction, self._heartbeat, self._log_break)
        self._examiner = NodeExaminer(config.look, config.cache, config.accepts, self._client.send)
        self._handlers[GiveNotice] = lambda notice, _: self._departure.request(notice.seconds, notice.reason)
        self._handlers |= {Examine: self._examiner.examine, ProbeNodes: self._examiner.probe}
        self._inbox: Inbox | ThreadedInbox = Inbox(self._client, self._aside)
        self._departure = Departure(
            config.grace,
            config.leave_request,
            self._client.send_last,
            lambda: self._run is not None and self._run.is_prepared,
            lambda: self._client.is_connected,
            self._keep_rank,
            self._log,
        )

    def serve(self) -> None:
        """Run the node until the master dismisses it, or it is asked to leave.

        Raises:
            NodeLost: the master rejects this node, with the reason.
            KeyboardInterrupt: it has left because of a signal.
        """
        try:
            with stop_signals_call(self._departure.on_signal):
                self._serve()
        except ConnectionLost as error:
            if not self._client.is_over:
                raise
            self._log(str(error))
        except KeyboardInterrupt:
            self._client.send_last(Leave())
            if not self._departure.is_requested:
                raise
        finally:
            self.close()

    def _serve(self) -> None:
        while True:
            frame = self._inbox.receive()
            if isinstance(frame.header, Dismiss):
                self._on_dismiss(frame.header)
                break
            self.handle(frame.header, frame.buffers)
            self._work()
        if self._departure.reason and not self._departure.is_requested:
            raise KeyboardInterrupt

    def close(self) -> None:
        """End the part in a run, and the connection."""
        self._departure.close()
        self._examiner.close()
        self._end_run()
        self._client.close()
        self._inbox.close()

    def handle(self, header: Header, buffers: Buffers) -> None:
        """Handle a message of the master, or let the part in the run that it names handle it."""
        run, handle = self._run, self._handlers.get(type(header))
        if handle is not None:
            handle(header, buffers)
        elif run is not None and getattr(header, "run", run.job.run) == run.job.run and type(header) in run.handlers:
            self._attempt(run.handlers[type(header)], header, buffers)

    def _aside(self, frame: Frame[Header]) -> bool:
        """Handle a frame that does not disturb the work, and need not wait for its end; return whether it was one."""
        header, run = frame.header, self._run
        if (
            isinstance(run, LeasePart)
            and run.takes_pieces_aside
            and isinstance(header, BlobChunk | FetchFrom | Welcome)
        ):
            run.take_aside(header, frame.buffers)
            return not isinstance(header, Welcome)
        if not isinstance(frame.header, Examine | GiveNotice | ProbeNodes):
            return False
        self._handlers[type(frame.header)](frame.header, frame.buffers)
        return True

    def _work(self) -> None:
        """Work on the leases, one at a time, until a frame arrives or none is left."""
        while isinstance(self._run, LeasePart) and self._run.can_work:
            if not self._attempt(self._run.work):
                return
            self._note_progress()

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Call an action of the run, and return whether it succeeded; a failure ends this node's part in the run."""
        try:
            action(*arguments)
        except RunEnded:
            return False
        except NodeLost:  # a lost connection is no failure of the task
            raise
        except SystemExit as error:  # of the task's own code, which must not end this node
            self._resign(ended_by_itself(error))
            return False
        except Exception as error:
            failure = explained_failure(error, self._config.device, node=self._name, advice=_SMALLER_BATCH)
            self._resign(failure or error)
            if isinstance(failure, DeviceLost):
                self._client.send_last(Leave())
                raise failure from error
            return False
        return True

    def _watch_device(self) -> None:
        """End this node if its accelerator hangs during the run that begins."""
        if self._config.device == "cpu":
            return
        import torch  # the run loads it anyway

        from evener.system.device_watch import DeviceWatch

        self._watch = DeviceWatch(torch.device(self._config.device), self._client.patience, self._end_hanging)
        self._watch.start()

    def _end_hanging(self, why: str) -> None:
        """Leave the master and end this process, whose main thread waits for a device that hangs."""
        lost = device_lost(self._config.device, why, node=self._name)
        if (run := self._run) is not None:
            self._client.send_last(NotReady(run=run.job.run, reason=shown(str(lost))))
        self._client.send_last(Leave())
        end_process(lost)

    def _resign(self, error: Exception) -> None:
        """Tell the master that this node cannot take part in the run, and why."""
        assert self._run is not None
        job, reason = self._run.job, shown(explain(error))
        self._log(f"cannot take part in {job.title}: {reason}")
        self._end_run()
        self._send(NotReady(run=job.run, reason=reason, kind=kind_of(error)))

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
        if self._run is not None:
            self._attempt(self._run.resend)
        self._departure.repeat()

    def _keep_rank(self) -> None:
        """Let the rank of this node finish its step, though the same signal may have reached it."""
        if isinstance(run := self._run, RankPart):
            run.carry_on()

    def _on_prepare(self, _: Prepare, buffers: Buffers) -> None:
        job = decode_job(buffers[0])
        if isinstance(self._run, LeasePart) and self._run.job.run == job.run:
            return  # requested over an earlier connection
        if not self._takes_part(job):
            return
        if (job.agreement.is_overlapped or job.reads_early) and isinstance(self._inbox, Inbox):
            self._inbox = ThreadedInbox(self._client, self._inbox.waiting, self._aside)
        self._run = LeasePart(job, self._config, self._send, self._between_steps, lambda: self._inbox.check_run())
        self._watch_device()
        self._advance(self._run, self._run.start)

    def _on_prepare_rank(self, _: PrepareRank, buffers: Buffers) -> None:
        job = decode_rank_job(buffers[0])
        if isinstance(self._run, RankPart) and self._run.job == job:
            self._run.repeat_ready()
            return
        if self._takes_part(job, self._no_ranks()):
            self._run = RankPart(job, self._config, self._send_at_once, self._log)
            self._advance(self._run, self._run.start)

    def _no_ranks(self) -> str:
        """Return why this node starts no ranks that work together; empty if it does."""
        if self._config.host is not None:
            return ""
        return _NO_TORCH if has_posix() else _NO_POSIX

    def _takes_part(self, job: Job | RankJob, obstacle: str = "") -> bool:
        """End the part in an earlier run; return whether this node takes part in `job`, or tell the master why not."""
        self._end_run()
        objection = self._config.accepts.objection(job) or obstacle
        if objection:
            self._log(f"does not take part in {job.title}: {objection}")
            self._send(NotReady(run=job.run, reason=shown(objection)))
        else:
            self._log(f"preparing for {job.title}")
        return not objection

    def _on_chunk(self, chunk: BlobChunk, buffers: Buffers) -> None:
        if self._run is not None:
            self._advance(self._run, self._run.on_chunk, chunk, buffers[0])

    def _on_fetch_from(self, where: FetchFrom, _: Buffers) -> None:
        if self._run is not None:
            self._advance(self._run, self._run.on_fetch_from, where)

    def _advance(self, run: NodePart, action: Callable[..., None], *arguments: Any) -> None:
        """Take a step of the preparation."""
        was_prepared = run.is_prepared
        with sign_of_life(self._log, f"preparing for {run.job.title}"):
            succeeded = self._attempt(action, *arguments)
        if succeeded and run.is_prepared and not was_prepared:
            self._log(f"ready for {run.job.title}")

    def _on_quarantine(self, quarantine: Quarantine, _: Buffers) -> None:
        self._log(f"excluded: {quarantine.reason}; the master uses this node again in {quarantine.seconds:.3g} s")
        if isinstance(self._run, LeasePart):
            self._run.drop_leases()

    def _on_release(self, release: Release, _: Buffers) -> None:
        if self._run is not None and self._run.job.run == release.run:
            self._log(f"done with {self._run.job.title}")
            self._end_run()

    def _on_dismiss(self, dismiss: Dismiss) -> None:
        if dismiss.is_error:
            raise NodeLost(f"the master refuses node {self._name}: {dismiss.reason}")
        self._log(f"dismissed by the master: {dismiss.reason}")

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _between_steps(self) -> None:
        self._steps += 1
        self._note_progress()
        self._inbox.check_run()

    def _note_progress(self) -> None:
        if self._watch is not None:
            self._watch.at_step()

    def _send(self, header: Header, *buffers: Buffer) -> None:
        self._inbox.send(header, buffers)

    def _send_at_once(self, header: Header, *buffers: Buffer) -> None:
        self._client.send(header, buffers)

    def _introduction(self) -> Join:
        config, run = self._config, self._run
        return Join(
            protocol=PROTOCOL_VERSION,
            name=self._name,
            incarnation=self._incarnation,
            evener=config.versions.evener,
            python=config.versions.python,
            torch=config.versions.torch,
            clock=time.time(),
            device=config.device,
            run=run.job.run if isinstance(run, LeasePart) and run.is_prepared else "",
            profile=self._profile,
            key=config.key,
            is_named=config.is_named,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(peak_memory_bytes=peak_memory(), steps=self._steps)

    def _log_break(self, why: str) -> None:
        self._log(f"{why}; reconnecting to the master" if why else "reconnected to the master")


def explain(error: Exception) -> str:
    """Describe an error in one sentence."""
    if isinstance(error, EvenerError):
        return str(error)
    return f"{words_of(error)}{place_of(error)}"
