"""What the master does about each message of nodes and commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from evener.profile import ClusterProfile
from evener.ps import messages as say
from evener.ps.admission import Versions, admission_of
from evener.ps.consequences import Consequences
from evener.ps.decision import Decision
from evener.ps.employer import Employer
from evener.ps.members import Member, Members
from evener.ps.messages import Header
from evener.ps.state_dir import StateDir
from evener.ps.status import ClusterStatus, encode_status, node_statuses
from evener.schema import write_noun
from evener.wire.server import Server


class Desk(NamedTuple):
    """What a conversation needs to know.

    Attributes:
        home: the master's folder.
        versions: of what runs here.
        patience: seconds of silence after which a node is given up.
        tell: tells the master's user.
        clock: seconds, never going back.
    """

    home: StateDir
    versions: Versions
    patience: float
    tell: Callable[[str], None]
    clock: Callable[[], float]


class Conversation:
    """See the first line.

    Args:
        desk: see there.
        hub: of all connections.
        members: the nodes.
        employer: of the nodes.
        consequences: of what nodes do.
        end: called when a command ends the master.

    Attributes:
        origins: addresses of all connections.
        address: of the master.
    """

    def __init__(
        self,
        desk: Desk,
        hub: Server[Header],
        members: Members,
        employer: Employer,
        consequences: Consequences,
        end: Callable[[], None],
    ) -> None:
        self._desk, self._hub, self._members = desk, hub, members
        self._employer, self._consequences, self._end = employer, consequences, end
        self.origins: dict[int, str] = {}
        self.address = ""

    def on_message(self, peer: int, header: Header, buffers: Sequence[memoryview]) -> None:
        """Somebody said something."""
        member = self._members.at(peer)
        if member is not None:
            self._consequences.of_hearing(member)
            if type(header) in _OF_NODES:
                _OF_NODES[type(header)](self, member, header)
                return
        if type(header) in _OF_ANYBODY:
            _OF_ANYBODY[type(header)](self, peer, header, buffers)
        elif not isinstance(header, say.Heartbeat):
            self._hub.disconnect(peer, "it has to join first")

    def _on_join(self, peer: int, join: say.Join, _: object) -> None:
        desk, reception = self._desk, admission_of(join, self._desk.versions, time.time())
        decisions: tuple[Decision, ...] = ()
        if not reception.refusal:
            decisions = self._members.decide("joined", join.name, join.incarnation, desk.clock())
        reasons = [reception.refusal, *(one.reason for one in decisions if one.verdict == "dismiss")]
        if any(reasons):
            self._consequences.turn_away(peer, next(filter(None, reasons)))
            return
        for remark in reception.remarks:
            desk.tell(f"warning: {remark}")
        earlier = self._members.connect(
            Member(join.name, join.incarnation, peer, self.origins[peer], join.device, join.profile, join.run)
        )
        if earlier is not None:
            self._consequences.turn_away(earlier, "a later process of that name has taken its place")
        self._hub.send(peer, say.Welcome(patience=desk.patience, remarks=reception.remarks))
        self._consequences.follow(decisions)

    def _on_profiled(self, member: Member, header: say.Profiled) -> None:
        member.profile = header.profile
        profiles = [one.profile for one in self._members.by_name.values() if one.profile is not None]
        write_noun(ClusterProfile(devices=tuple(profiles)), self._desk.home.profile)
        if self._members.is_present(member.name):
            self._employer.take_in(member.name)

    def _on_beat(self, member: Member, header: say.Heartbeat) -> None:
        member.peak_memory_bytes = header.peak_memory_bytes
        if header.steps != member.steps and self._employer.run is not None:
            self._employer.run.gets_on(member.name)
        member.steps = header.steps

    def _on_leave(self, member: Member, _: say.Leave) -> None:
        self._consequences.of("goodbye", member)

    def _on_ready(self, member: Member, header: say.Ready) -> None:
        self._employer.ready(member, header.run, header.unit_seconds)

    def _on_unfit(self, member: Member, header: say.NotReady) -> None:
        self._employer.unfit(member, header.run, header.reason)

    def _on_contribution(self, member: Member, header: say.Contribution) -> None:
        """One without any bytes."""
        if self._employer.run is not None:
            self._employer.run.contribute(member.name, header, 0)

    def _on_assessed(self, member: Member, header: say.Validated) -> None:
        if self._employer.run is not None:
            self._employer.run.assessed(member.name, header)

    def _on_fetch(self, peer: int, header: say.FetchBlob, _: object) -> None:
        self._employer.fetch(peer, header)

    def _on_chunk(self, peer: int, header: say.BlobChunk, buffers: Sequence[memoryview]) -> None:
        self._employer.chunk(peer, header, buffers[0] if buffers else memoryview(b""))

    def _on_submit(self, peer: int, _: say.SubmitRun, buffers: Sequence[memoryview]) -> None:
        self._employer.submit(peer, buffers)

    def _on_watch(self, peer: int, header: say.WatchRun, _: object) -> None:
        self._employer.watch(peer, header.run)

    def _on_stop(self, _: int, header: say.StopRun, __: object) -> None:
        self._employer.stop(header)

    def _on_ask(self, peer: int, _: say.GetStatus, __: object) -> None:
        run = self._employer.run
        ledger = run.ledger if run else None
        nodes = node_statuses(self._members.by_name, self._members.roster, ledger, self._desk.clock())
        situation = ClusterStatus(address=self.address, nodes=nodes, run=self._employer.state())
        self._hub.send(peer, say.StatusReply(), (encode_status(situation),))

    def _on_down(self, _: int, __: say.ShutDown, ___: object) -> None:
        self._end()


_OF_NODES: dict[type[Header], Callable[[Conversation, Member, Any], None]] = {
    say.Profiled: Conversation._on_profiled,
    say.Heartbeat: Conversation._on_beat,
    say.Leave: Conversation._on_leave,
    say.Ready: Conversation._on_ready,
    say.NotReady: Conversation._on_unfit,
    say.Contribution: Conversation._on_contribution,
    say.Validated: Conversation._on_assessed,
}
_OF_ANYBODY: dict[type[Header], Callable[[Conversation, int, Any, Sequence[memoryview]], None]] = {
    say.Join: Conversation._on_join,
    say.FetchBlob: Conversation._on_fetch,
    say.BlobChunk: Conversation._on_chunk,
    say.SubmitRun: Conversation._on_submit,
    say.WatchRun: Conversation._on_watch,
    say.StopRun: Conversation._on_stop,
    say.GetStatus: Conversation._on_ask,
    say.ShutDown: Conversation._on_down,
}
"""What a command says; a node may fetch blobs, too, and joins."""
