"""The master's handlers for each message: memory for its bytes while they arrive, and the method that handles it.

head of a frame    -> place: memory for its buffers
bytes of it        -> on_part: a contribution is handled when its last byte arrives, and is no event
whole frame        -> on_message: HANDLERS maps the type of the header to its method
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from evener.ps.master.access.invitations import ASK_FOR_ANOTHER
from evener.ps.master.access.quotas import (
    IDLE_PATIENCES,
    MAX_FETCHES,
    MAX_FETCHING,
    Arrivals,
    require_room,
    require_size,
)
from evener.ps.master.command_handlers import COMMANDS, CommandHandlers
from evener.ps.master.effects import Effects
from evener.ps.master.examination.examinations import Examinations, look_here
from evener.ps.master.joining import Joining
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.rank_handlers import RankHandlers
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol import examination_messages as e
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.examination_messages import ExamineNodes
from evener.ps.protocol.job import MIN_BYTES_PER_SECOND
from evener.ps.protocol.messages import FetchBlob, Header, Invite, Join, RevokeInvitation
from evener.records.schema import shown
from evener.system.malloc import return_free_memory
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer, allocate
from evener.wire.identity import Grant, Role, host_in
from evener.wire.server import Server


class Handlers:
    """Handlers of all messages.

    Args:
        config: configuration of the master.
        nodes: all nodes.
        scheduler: runs of the master.
        effects: carries out what happens to nodes.
        server: server of the connections.

    Attributes:
        commands: handlers of commands' messages.
    """

    def __init__(
        self, config: MasterConfig, nodes: Nodes, scheduler: Scheduler, effects: Effects, server: Server[Header]
    ) -> None:
        self._config, self._nodes, self._scheduler, self._effects = config, nodes, scheduler, effects
        self._server = server
        self._origins: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._grants: dict[int, Grant] = {}
        self._joining = Joining(config, nodes, effects)
        self._arrivals = Arrivals(server.fail)
        self._fetches = Fetches(server, self._give, config.clock, IDLE_PATIENCES * config.patience)
        self._rank_handlers = RankHandlers(scheduler)
        self._examinations = Examinations(nodes, server.send, lambda: look_here(config.home))
        self.commands = CommandHandlers(
            config, nodes, scheduler, effects, self._examinations, server.send, self._close_revoked
        )

    def load(self) -> None:
        """Load what the last master of this state folder saved. Raises InvalidInput: a file is damaged."""
        self._effects.members.load()
        self._effects.invitations.load()

    def close(self) -> None:
        """Save what has changed and is not saved yet."""
        self._joining.close()

    def on_connected(self, peer: int, origin: str, grant: Grant) -> None:
        """Note a new connection from the address `origin`, and the grant of its token."""
        self._origins[peer], self._heard[peer], self._grants[peer] = origin, self._config.clock(), grant
        if reason := self._effects.invitations.why_no_submitter(grant):
            self._server.disconnect(peer, reason)

    def on_disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        self._origins.pop(peer, None)
        self._heard.pop(peer, None)
        self._grants.pop(peer, None)
        self._arrivals.end(peer)
        self._fetches.disconnected(peer)
        self._scheduler.disconnected(peer)
        self._scheduler.holders.disconnected(peer)
        self._examinations.disconnected(peer)
        node = self._nodes.disconnect(peer)
        if node is not None:
            self._effects.of("disconnected", node)

    def tick(self, now: float) -> None:
        """Do what is due; close idle connections, whose number is limited."""
        self._examinations.tick(now)
        self._joining.tick()
        self.serve()
        most = IDLE_PATIENCES * self._config.patience
        submissions = self._scheduler.submissions
        if (submission := submissions.tick()) is not None:
            try:
                self._scheduler.begin(submission)
            except Exception as error:  # the error concerns this command only
                self._server.fail(submission.peer, error)
        if (stalled := submissions.stalled()) is not None:
            self._server.fail(
                stalled, BadFrame(f"its run arrives at less than {MIN_BYTES_PER_SECOND} bytes per second")
            )
        for peer, heard in list(self._heard.items()):
            if self._nodes.at(peer) is not None or self._awaits_something(peer):
                self._heard[peer] = now
            elif now - heard > most:
                self._server.disconnect(peer, f"it was idle for {most:g} s")

    def _awaits_something(self, peer: int) -> bool:
        """Return whether a command's connection is not idle, though it says nothing: it is owed or sent something."""
        scheduler = self._scheduler
        return (
            scheduler.is_watching(peer)
            or scheduler.submissions.is_of(peer)
            or self._examinations.is_of(peer)
            or self._server.is_sending(peer)
        )

    def serve(self) -> None:
        """Send the next pieces of blobs."""
        self._fetches.serve()

    def who(self, peer: int) -> tuple[str, str, str]:
        """Return name, address and invitation of a peer; the name is empty unless it is a node."""
        node, grant = self._nodes.at(peer), self._grants.get(peer, Grant())
        return "" if node is None else node.name, self._origins.get(peer, ""), grant.invitation

    def place(self, peer: int, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer] | None:
        """Return memory for the buffers of a frame; None if they are not needed.

        Raises:
            BadFrame: the buffers are too large for this kind, or the peer may not send it.
        """
        if type(header) is m.Contribution:
            if (node := self._nodes.at(peer)) is None:
                raise BadFrame("it has to join first")
            if len(lengths) > 1:
                raise BadFrame(f"a contribution has one buffer, got {len(lengths)}")
            run = self._scheduler.training_of(node)
            inbox = run.inbox(node, header, lengths[0]) if run is not None and lengths else None
            return None if inbox is None else (inbox,)
        self._require_rights(peer, type(header))
        if type(header) is r.RankEnded and lengths:
            return self._rank_handlers.place_weights(self._nodes.at(peer), header, lengths)
        if type(header) is m.SubmitRun:
            return allocate(header, lengths) if self._wants_submission(peer, lengths) else None
        require_size(type(header), lengths)
        if lengths and not self._is_wanted(peer, header, lengths):
            return None
        role = self._grants[peer].role if is_of_command(type(header)) else "node"
        self._arrivals.begin(peer, sum(lengths), role)
        return allocate(header, lengths)

    def _is_wanted(self, peer: int, header: Header, lengths: tuple[int, ...]) -> bool:
        """Return whether an examination, a submission or a run in progress asked for the buffers of a message."""
        node = self._nodes.at(peer)
        if type(header) in OF_RANKS:
            return self._rank_handlers.is_wanted(node, header, lengths)
        if isinstance(header, e.Examined | e.Probed):
            return node is not None and self._examinations.is_wanted(node, header)
        return not isinstance(header, m.BlobChunk) or self._scheduler.submissions.is_of(peer)

    def _wants_submission(self, peer: int, lengths: tuple[int, ...]) -> bool:
        """Return whether a run may arrive now in these buffers; a run of an admin displaces that of a submitter."""
        grant, submissions = self._grants[peer], self._scheduler.submissions
        is_admin = grant.role == "admin"
        if is_admin and (displaced := submissions.displace()) is not None:
            self._server.fail(displaced, BadFrame("an admin submits a run: submit yours again"))
        submitter = self._effects.invitations.submitter_of(grant)
        return submissions.wants(peer, lengths, submitter, is_admin=is_admin)

    def on_part(self, peer: int, header: Header, received: int, is_whole: bool) -> bool:
        """Note that `received` bytes of a frame have arrived; return whether the frame needs no `on_message`."""
        node = self._nodes.at(peer)
        if node is not None:
            self._effects.of_hearing(node)
        if not isinstance(header, m.Contribution):
            self._arrivals.move(peer)
            if isinstance(header, m.SubmitRun):
                self._scheduler.submissions.arrived(peer, received)
            return False
        if node is not None and (run := self._scheduler.training_of(node)) is not None:
            if is_whole:
                run.contribute(node, header, received)
                self._effects.of_runs()
            else:
                run.arrived(node, header, received)
        return True

    def on_message(self, peer: int, header: Header, buffers: Sequence[memoryview]) -> None:
        """Handle a frame, and return the memory of a large one to the system."""
        try:
            self._handle(peer, header, buffers)
        finally:
            if type(header) in _DECODED and sum(map(len, buffers)) > _LARGE_BYTES:
                return_free_memory()

    def _handle(self, peer: int, header: Header, buffers: Sequence[memoryview]) -> None:
        self._arrivals.end(peer)
        node, handler = self._nodes.at(peer), HANDLERS.get(type(header))
        if node is not None:
            self._effects.of_hearing(node)
        elif peer in self._heard and not isinstance(
            header, m.Heartbeat
        ):  # heartbeats of a node that has not joined do not count
            self._heard[peer] = self._config.clock()
        kind = type(header)
        grant = self._require_rights(peer, kind)
        if kind in AUDITED:
            self._effects.audit.write(
                AUDITED[kind],
                name=self._effects.invitations.submitter_of(grant),
                address=self._origins[peer],
                invitation=grant.invitation,
                detail=shown(repr(header)),
                is_limited=grant.role != "admin",
            )
        if kind in COMMANDS:
            if kind is not m.BlobChunk:  # which is an answer itself
                require_room(self._server, peer)
            self.commands.on_message(peer, self._grants[peer], header, buffers)
        elif handler is not None and (node is not None or kind is Join):
            handler(self, peer, node, header, buffers)
        elif not isinstance(header, m.Heartbeat):
            self._server.disconnect(peer, "it has to join first")
        self._effects.of_runs()

    def _require_rights(self, peer: int, kind: type[Header]) -> Grant:
        """Return the peer's grant. Raises BadFrame: it does not allow messages of this kind, or is no longer valid."""
        grant = self._grants.get(peer, Grant("node"))
        if not may_send(grant.role, kind):
            self._tell_refusal(peer, wrong_token(grant.role, kind), to_command=is_of_command(kind))
            raise BadFrame(f"the token of a {grant.role} does not allow {kind.__name__}")
        if reason := self._effects.invitations.why_no_submitter(grant):
            self._tell_refusal(peer, reason, to_command=True)
            raise BadFrame(f"{kind.__name__}: {reason}")
        return grant

    def _tell_refusal(self, peer: int, reason: str, *, to_command: bool) -> None:
        """Tell a peer why its connection is about to be closed."""
        header = m.Refused(reason=reason, is_final=True) if to_command else m.Dismiss(reason=reason, is_error=True)
        self._server.send(peer, header)

    def _close_revoked(self, invitation: str) -> None:
        """Close the connections of a revoked invitation, but not those of nodes that have joined."""
        reason = f"{self._effects.invitations.why_not(invitation)}: {ASK_FOR_ANOTHER}"
        for peer, grant in list(self._grants.items()):
            if grant.invitation == invitation and self._nodes.at(peer) is None:
                self._tell_refusal(peer, reason, to_command=grant.role == "submitter")
                self._effects.audit.write("closed", address=self._origins[peer], invitation=invitation, detail=reason)
                self._server.disconnect(peer, reason)

    def _join(self, peer: int, node: NodeRecord | None, join: Join, _: object) -> None:
        if node is not None:  # else the run would wait for the first node, which has no connection any more
            raise BadFrame("a node has joined over this connection before")
        self._joining.join(peer, self._origins[peer], self._grants[peer].invitation, join)

    def _profiled(self, _: int, node: NodeRecord, header: m.Profiled, __: object) -> None:
        self._joining.profiled(node, header.profile)
        if node.can_work:
            self._scheduler.admit(node)

    def _heartbeat(self, _: int, node: NodeRecord, header: m.Heartbeat, __: object) -> None:
        node.peak_memory_bytes = header.peak_memory_bytes
        done = header.steps - node.steps
        if done > 0 and node.steps_left > 0 and (run := self._scheduler.training_of(node)) is not None:
            node.steps_left = max(0, node.steps_left - done)
            run.progress(node)
        node.steps = header.steps

    def _notice(self, _: int, node: NodeRecord, header: m.Notice, __: object) -> None:
        self._effects.notice(node, header.seconds + self._nodes.patience, header.reason)  # it ends by itself before

    def _leave(self, _: int, node: NodeRecord, __: m.Leave, ___: object) -> None:
        self._effects.of("goodbye", node)

    def _ready(self, _: int, node: NodeRecord, header: m.Ready, __: object) -> None:
        self._scheduler.ready(node, header)

    def _not_ready(self, _: int, node: NodeRecord, header: m.NotReady, __: object) -> None:
        error = None if header.kind is None else header.kind.as_error(header.reason)
        self._scheduler.not_ready(node, header.run, header.reason, error)

    def _contribution(self, _: int, node: NodeRecord, header: m.Contribution, __: object) -> None:
        """Handle a contribution without any bytes."""
        if (run := self._scheduler.training_of(node)) is not None:
            run.contribute(node, header, 0)

    def _validated(self, _: int, node: NodeRecord, header: m.Validated, __: object) -> None:
        if (run := self._scheduler.training_of(node)) is not None:
            run.validated(node, header)

    def _fetch(self, peer: int, node: NodeRecord | None, header: m.FetchBlob, _: object) -> None:
        if node is not None and (run := self._scheduler.training_of(node)) is not None:
            run.progress(node)  # it may wait for data of the samples that it works on
        self._fetches.ask(peer, header)

    def _offer_pieces(self, peer: int, _: object, header: m.OfferPieces, __: object) -> None:
        self._scheduler.holders.offer(peer, header, host_in(self._origins[peer]))

    def _give(self, peer: int, fetch: m.FetchBlob) -> None:
        self._scheduler.fetch(peer, fetch)

    def _examined(self, _: int, node: NodeRecord, header: e.Examined, buffers: Sequence[memoryview]) -> None:
        self._examinations.examined(node, header, buffers)

    def _of_rank(self, _: int, node: NodeRecord, header: Header, buffers: Sequence[memoryview]) -> None:
        self._rank_handlers.on_message(node, header, buffers)

    def _probed(self, _: int, node: NodeRecord, header: e.Probed, buffers: Sequence[memoryview]) -> None:
        self._examinations.probed(node, header, buffers)


OF_RANKS: tuple[type[Header], ...] = (
    r.RankReady, r.RankSaid, r.RankShown, r.RankSaved, r.RankPiece, r.RankEnded
)  # fmt: skip
HANDLERS: dict[type[Header], Callable[[Handlers, int, Any, Any, Any], None]] = {
    Join: Handlers._join,
    m.FetchBlob: Handlers._fetch,
    m.OfferPieces: Handlers._offer_pieces,
    m.Profiled: Handlers._profiled,
    m.Heartbeat: Handlers._heartbeat,
    m.Notice: Handlers._notice,
    m.Leave: Handlers._leave,
    m.Ready: Handlers._ready,
    m.NotReady: Handlers._not_ready,
    m.Contribution: Handlers._contribution,
    m.Validated: Handlers._validated,
    e.Examined: Handlers._examined,
    e.Probed: Handlers._probed,
    **dict.fromkeys(OF_RANKS, Handlers._of_rank),
}
"""Handlers by type of message."""


class Fetches:
    """The open requests of all peers.

    Args:
        server: server of the connections.
        give: sends a peer the piece that it requested.
        clock: seconds.
        most_seconds: time within which a peer has to take a piece while others wait.
    """

    def __init__(
        self,
        server: Server[Header],
        give: Callable[[int, FetchBlob], None],
        clock: Callable[[], float],
        most_seconds: float,
    ) -> None:
        self._server, self._give, self._clock, self._most_seconds = server, give, clock, most_seconds
        self._requests: dict[int, deque[FetchBlob]] = {}
        self._taking: dict[int, float] = {}  # when each was sent its last piece, the earliest first

    def ask(self, peer: int, fetch: FetchBlob) -> None:
        """Add a peer's request for a piece. Raises BadFrame: too many of its requests are open."""
        requests = self._requests.setdefault(peer, deque())
        if len(requests) >= MAX_FETCHES:
            raise BadFrame(f"too many requests: {MAX_FETCHES} pieces are waiting for this peer")
        requests.append(fetch)
        self.serve()

    def serve(self) -> None:
        """Send a piece to each peer whose queue is empty; peers that do not take theirs lose their connection."""
        self._taking = {peer: since for peer, since in self._taking.items() if self._server.num_waiting(peer)}
        for peer in list(self._requests):
            while peer in self._requests and not self._server.num_waiting(peer) and self._has_room():
                requests = self._requests[peer]
                self._give(peer, requests.popleft())
                if not requests:
                    self._requests.pop(peer, None)
                if self._server.num_waiting(peer):
                    self._taking[peer] = self._clock()

    def _has_room(self) -> bool:
        """Return whether another peer may be sent a piece; the peer that takes longest may have to make room."""
        if len(self._taking) < MAX_FETCHING:
            return True
        slowest, since = next(iter(self._taking.items()))
        if self._clock() - since <= self._most_seconds:
            return False
        self.disconnected(slowest)
        reason = f"it did not take a piece of a blob within {self._most_seconds:g} s, and other peers wait for theirs"
        self._server.fail(slowest, BadFrame(reason))
        return True

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        self._requests.pop(peer, None)
        self._taking.pop(peer, None)


_NODES: tuple[Role, ...] = ("node", "admin")
_SUBMITTERS: tuple[Role, ...] = ("submitter", "admin")
_MAY: dict[type[Header], tuple[Role, ...]] = {
    m.GetStatus: _SUBMITTERS,
    m.SubmitRun: _SUBMITTERS,
    m.BlobChunk: _SUBMITTERS,
    m.WatchRun: _SUBMITTERS,
    m.StopRun: _SUBMITTERS,
    m.AssignNodes: _SUBMITTERS,
    ExamineNodes: _SUBMITTERS,
    m.ExpelNode: ("admin",),
    m.ReleaseNode: ("admin",),
    m.ForgetNode: ("admin",),
    m.ShutDown: ("admin",),
    Invite: ("admin",),
    RevokeInvitation: ("admin",),
}
"""Roles that may send a message; messages that are not listed come from nodes."""
_DECODED = (m.SubmitRun, ExamineNodes, r.RankShown)
"""Messages whose buffers are decoded, into many small objects; the buffers of others are forwarded or stored."""
_LARGE_BYTES = 2**20
"""Bytes of such buffers after which the master returns its free memory, in about a millisecond."""
AUDITED: dict[type[Header], str] = {
    m.SubmitRun: "submitted",
    m.StopRun: "asked to stop",
    m.AssignNodes: "assigned nodes",
    ExamineNodes: "had the nodes looked at",
    m.ExpelNode: "asked to expel",
    m.ReleaseNode: "asked to release",
    m.ForgetNode: "forgot",
    m.ShutDown: "ended",
    Invite: "invited",
    RevokeInvitation: "revoked",
}
"""Actions of commands, as the audit log names them."""


_CURES: dict[tuple[Role, ...], str] = {
    _NODES: "a node's",
    _SUBMITTERS: "a submitter's (`tokens/submitter` in the master's home, or `evener invite --submitter NAME`)",
    ("admin",): "an admin's (`tokens/admin` in the master's home)",
}


def may_send(role: Role, kind: type[Header]) -> bool:
    """Return whether a token of `role` allows messages of this kind."""
    return role in _MAY.get(kind, _NODES)


def is_of_command(kind: type[Header]) -> bool:
    """Return whether commands send messages of this kind; nodes send the others."""
    return kind in _MAY


def wrong_token(role: Role, kind: type[Header]) -> str:
    """Say that a token does not allow messages of this kind, and which one does."""
    article = "an" if role == "admin" else "a"
    return f"this is {article} {role}'s token; use {_CURES[_MAY.get(kind, _NODES)]}"
