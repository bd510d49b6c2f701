"""What the master does about each message: where its bytes go while they arrive, and who deals with it.

    head of a frame    -> place: memory for what comes
    bytes of it        -> on_part: a contribution is dealt with the moment its last byte is here: a node that overlaps
                          communication with work may have the next one right behind it, for the same memory
    whole frame        -> on_message: HANDLERS says by the type of the header which method deals with it

All that has to leave goes into the outbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from evener.profile import ClusterProfile
from evener.ps import messages as m
from evener.ps.admission import Versions, admission_of
from evener.ps.blob import CHUNK_BYTES
from evener.ps.effects import Effects
from evener.ps.messages import Header, Outbox
from evener.ps.node_state import Transition
from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.scheduler import Scheduler
from evener.ps.state_dir import StateDir
from evener.ps.status import ClusterStatus, RunStatus, encode_status
from evener.ps.training_run import TrainingRun
from evener.schema import write_noun
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer, allocate


class Handlers:
    """See the first lines.

    Args:
        home: the master's folder.
        versions: of what runs here.
        nodes: all nodes.
        scheduler: of runs.
        effects: of what happens to nodes.
        outbox: takes what has to leave.
        clock: seconds, never going back.
        notify: tells the master's user.

    Attributes:
        address: of the master.
        is_ending: whether a command ends the master.
    """

    def __init__(
        self,
        home: StateDir,
        versions: Versions,
        nodes: Nodes,
        scheduler: Scheduler,
        effects: Effects,
        outbox: Outbox,
        clock: Callable[[], float],
        notify: Callable[[str], None],
    ) -> None:
        self._home, self._versions, self._clock, self._notify = home, versions, clock, notify
        self._nodes, self._scheduler, self._effects, self._outbox = nodes, scheduler, effects, outbox
        self._origins: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self.address = ""
        self.is_ending = False

    def on_connected(self, peer: int, origin: str) -> None:
        """Somebody has connected, from the address `origin`."""
        self._origins[peer] = origin

    def on_disconnected(self, peer: int) -> None:
        """A connection is gone."""
        self._origins.pop(peer, None)
        self._lengths.pop(peer, None)
        self._scheduler.disconnected(peer)
        node = self._nodes.disconnect(peer)
        if node is not None:
            self._effects.of("disconnected", node)

    def place(self, peer: int, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer] | None:
        """Memory for the buffers of a frame; None if nobody wants them.

        Raises:
            BadFrame: nothing of that kind may bring so much, or not from there.
        """
        if type(header) is m.Contribution:
            return self._place_contribution(peer, header, lengths)
        is_blob = isinstance(header, m.BlobChunk) and sum(lengths) <= CHUNK_BYTES
        if lengths and not is_blob and not isinstance(header, m.SubmitRun):
            raise BadFrame(f"{type(header).__name__} brings {sum(lengths)} bytes too many")
        return allocate(header, lengths)

    def on_part(self, peer: int, header: Header, received: int) -> None:
        """So many bytes of a frame's buffers are here."""
        node, run = self._nodes.at(peer), self._scheduler.run
        if node is None:
            return
        self._effects.of_hearing(node)
        if type(header) is not m.Contribution or run is None:
            return
        if received < self._lengths[peer]:
            run.arrived(node, header, received)
        else:
            run.contribute(node, header, received)
            self._effects.of_run()

    def on_message(self, peer: int, header: Header, buffers: Sequence[memoryview]) -> None:
        """A frame is here."""
        if type(header) is m.Contribution and self._lengths.get(peer, 0) > 0:
            return  # dealt with when its last byte came
        node, handler = self._nodes.at(peer), HANDLERS.get(type(header))
        if node is not None:
            self._effects.of_hearing(node)
        if handler is not None and (node is not None or type(header) in FROM_ANYBODY):
            handler(self, peer, node, header, buffers)
        elif not isinstance(header, m.Heartbeat):
            self._outbox.disconnect(peer, "it has to join first")
        self._effects.of_run()

    def _place_contribution(
        self, peer: int, header: m.Contribution, lengths: tuple[int, ...]
    ) -> Sequence[Buffer] | None:  # fmt: skip
        self._lengths[peer] = sum(lengths)
        node, run = self._nodes.at(peer), self._scheduler.run
        if node is None:
            raise BadFrame("it has to join first")
        if run is None or len(lengths) != 1:
            return None
        inbox = run.inbox(node, header, lengths[0])
        return None if inbox is None else (inbox,)

    def _join(self, peer: int, _: NodeRecord | None, join: m.Join, __: object) -> None:
        admission = admission_of(join, self._versions, time.time())
        transitions: tuple[Transition, ...] = ()
        if not admission.refusal:
            node = self._nodes.record(join.name)
            transitions = self._nodes.decide("joined", node, self._clock(), join.incarnation)
        reasons = [admission.refusal, *(one.reason for one in transitions if one.kind == "dismiss")]
        if any(reasons):
            self._effects.turn_away(peer, next(filter(None, reasons)))
            return
        for remark in admission.remarks:
            self._notify(f"warning: {remark}")
        earlier = self._nodes.connect(node, peer)
        node.origin, node.device, node.profile, node.ready = self._origins[peer], join.device, join.profile, join.run
        node.doing, node.peak_memory_bytes, node.steps = "waits", 0, 0
        if earlier is not None:
            self._effects.turn_away(earlier, "a later process of that name has taken its place")
        self._outbox.send(peer, m.Welcome(patience=self._nodes.patience, remarks=admission.remarks))
        self._effects.follow(transitions)

    def _profiled(self, _: int, node: NodeRecord, header: m.Profiled, __: object) -> None:
        node.profile = header.profile
        profiles = [one.profile for one in self._nodes.by_name.values() if one.profile is not None]
        write_noun(ClusterProfile(devices=tuple(profiles)), self._home.profile)
        if node.is_present:
            self._scheduler.admit(node)

    def _heartbeat(self, _: int, node: NodeRecord, header: m.Heartbeat, __: object) -> None:
        node.peak_memory_bytes = header.peak_memory_bytes
        if header.steps != node.steps and self._scheduler.run is not None:
            self._scheduler.run.progress(node)
        node.steps = header.steps

    def _leave(self, _: int, node: NodeRecord, __: m.Leave, ___: object) -> None:
        self._effects.of("goodbye", node)

    def _ready(self, _: int, node: NodeRecord, header: m.Ready, __: object) -> None:
        self._scheduler.ready(node, header.run, header.unit_seconds)

    def _not_ready(self, _: int, node: NodeRecord, header: m.NotReady, __: object) -> None:
        if self._scheduler.run is not None and self._scheduler.run.job.run == header.run:
            self._effects.of_not_ready(node, header.reason)

    def _contribution(self, _: int, node: NodeRecord, header: m.Contribution, __: object) -> None:
        """One without any bytes."""
        if self._scheduler.run is not None:
            self._scheduler.run.contribute(node, header, 0)

    def _validated(self, _: int, node: NodeRecord, header: m.Validated, __: object) -> None:
        if self._scheduler.run is not None:
            self._scheduler.run.validated(node, header)

    def _fetch(self, peer: int, _: object, header: m.FetchBlob, __: object) -> None:
        self._scheduler.fetch(peer, header)

    def _chunk(self, peer: int, _: object, header: m.BlobChunk, buffers: Sequence[memoryview]) -> None:
        self._scheduler.chunk(peer, header, buffers[0] if buffers else memoryview(b""))

    def _submit(self, peer: int, _: object, __: m.SubmitRun, buffers: Sequence[memoryview]) -> None:
        self._scheduler.submit(peer, buffers)

    def _watch(self, peer: int, _: object, header: m.WatchRun, __: object) -> None:
        self._scheduler.watch(peer, header.run)

    def _stop(self, _: int, __: object, header: m.StopRun, ___: object) -> None:
        self._scheduler.stop(header)

    def _get_status(self, peer: int, _: object, __: m.GetStatus, ___: object) -> None:
        run = self._scheduler.run
        nodes = self._nodes.status(run.history.totals if run else {}, self._clock())
        status = ClusterStatus(address=self.address, nodes=nodes, run=self._run_status(run) if run else None)
        self._outbox.send(peer, m.StatusReply(), (encode_status(status),))

    def _run_status(self, run: TrainingRun) -> RunStatus:
        validations = run.history.validations
        return RunStatus(
            run=run.job.run,
            task=run.job.title,
            protocol=run.job.protocol,
            version=run.server.version,
            epoch=run.history.epoch,
            epochs=run.job.workload.num_epochs,
            loss=run.history.loss,
            accuracy=validations[-1].accuracy if validations else None,
            folder=str(self._home.runs / run.job.run),
        )

    def _shut_down(self, _: int, __: object, ___: m.ShutDown, ____: object) -> None:
        self.is_ending = True


FROM_ANYBODY: dict[type[Header], Callable[[Handlers, int, Any, Any, Any], None]] = {
    m.Join: Handlers._join,
    m.FetchBlob: Handlers._fetch,
    m.BlobChunk: Handlers._chunk,
    m.SubmitRun: Handlers._submit,
    m.WatchRun: Handlers._watch,
    m.StopRun: Handlers._stop,
    m.GetStatus: Handlers._get_status,
    m.ShutDown: Handlers._shut_down,
}
"""What a command sends; a node may fetch blobs, too, and joins."""
HANDLERS: dict[type[Header], Callable[[Handlers, int, Any, Any, Any], None]] = FROM_ANYBODY | {
    m.Profiled: Handlers._profiled,
    m.Heartbeat: Handlers._heartbeat,
    m.Leave: Handlers._leave,
    m.Ready: Handlers._ready,
    m.NotReady: Handlers._not_ready,
    m.Contribution: Handlers._contribution,
    m.Validated: Handlers._validated,
}
"""Who deals with a message: of anybody, or of a node that has joined."""
