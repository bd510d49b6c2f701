"""The master's handlers for each message of a command, and for pieces of blobs, which a node may send as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evener.ps.master.effects import Effects
from evener.ps.master.examination.examinations import Examinations
from evener.ps.master.nodes import Nodes
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol import messages as m
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.examination_messages import ExamineNodes
from evener.ps.protocol.messages import Header, Invite, Invited, RevokeInvitation, Send
from evener.ps.protocol.status import ClusterStatus, encode_status
from evener.records.errors import InvalidInput
from evener.records.schema import shown
from evener.wire.identity import Grant


class CommandHandlers:
    """Handlers of commands' messages; `COMMANDS` maps the type of a header to its method.

    Args:
        config: configuration of the master.
        nodes: all nodes.
        scheduler: runs of the master.
        effects: carries out what happens to nodes.
        examinations: examinations of nodes.
        send: sends a message to a connection.
        close_revoked: closes the connections of an invitation of this name.

    Attributes:
        address: address at which other machines reach the master.
        is_ending: whether a command ends the master.
    """

    def __init__(
        self,
        config: MasterConfig,
        nodes: Nodes,
        scheduler: Scheduler,
        effects: Effects,
        examinations: Examinations,
        send: Send,
        close_revoked: Callable[[str], None],
    ) -> None:
        self._config, self._nodes, self._scheduler, self._effects = config, nodes, scheduler, effects
        self._examinations, self._send, self._close_revoked = examinations, send, close_revoked
        self.address = ""
        self.is_ending = False

    def on_message(self, peer: int, grant: Grant, header: Header, buffers: Sequence[memoryview]) -> None:
        """Handle a frame of a peer with this grant; answer a request that cannot be fulfilled."""
        try:
            COMMANDS[type(header)](self, peer, grant, header, buffers)
        except InvalidInput as error:
            self._send(peer, m.Refused(reason=shown(str(error))))

    def _expel(self, peer: int, _: Grant, header: m.ExpelNode, __: object) -> None:
        if (node := self._nodes.by_name.get(header.name)) is None:
            raise InvalidInput(f"there is no node {header.name}")
        self._effects.expel(node, "by an admin")
        self._send_status(peer)

    def _release(self, peer: int, _: Grant, header: m.ReleaseNode, __: object) -> None:
        if (node := self._nodes.by_name.get(header.name)) is None or node.peer is None or node.has_left:
            raise InvalidInput(f"node {header.name} is not connected")
        self._effects.release(node, header.seconds, "an admin releases it")
        self._send_status(peer)

    def _forget(self, peer: int, _: Grant, header: m.ForgetNode, __: object) -> None:
        if not self._effects.members.forget(header.name):
            raise InvalidInput(f"no name {header.name} belongs to a node")
        self._send_status(peer)

    def _invite(self, peer: int, _: Grant, header: Invite, __: object) -> None:
        name, token = self._effects.invitations.invite(header.submitter, header.nodes, header.seconds)
        self._send(peer, Invited(invitation=name, token=token.text))

    def _revoke(self, peer: int, _: Grant, header: RevokeInvitation, __: object) -> None:
        if not self._effects.invitations.revoke(header.invitation):
            raise InvalidInput(f"there is no invitation {header.invitation}")
        self._close_revoked(header.invitation)
        self._send_status(peer)

    def _chunk(self, peer: int, _: Grant, header: m.BlobChunk, buffers: Sequence[memoryview]) -> None:
        self._scheduler.submissions.chunk(peer, header, buffers[0] if buffers else memoryview(b""))

    def _submit(self, peer: int, grant: Grant, _: m.SubmitRun, buffers: Sequence[memoryview]) -> None:
        self._scheduler.submit(peer, buffers, self._effects.invitations.submitter_of(grant))

    def _watch(self, peer: int, _: Grant, header: m.WatchRun, __: object) -> None:
        self._scheduler.watch(peer, header.run)

    def _stop(self, peer: int, grant: Grant, header: m.StopRun, __: object) -> None:
        self._require_owner(grant, header.run)
        self._scheduler.stop(header.run, at_once=header.at_once)
        self._send_status(peer)

    def _assign(self, peer: int, grant: Grant, header: m.AssignNodes, __: object) -> None:
        self._require_owner(grant, header.run)
        self._scheduler.assign(peer, header)

    def _require_owner(self, grant: Grant, run: str) -> None:
        submitter = self._effects.invitations.submitter_of(grant)
        if (owner := self._scheduler.owner_of(run)) not in (None, submitter) and grant.role != "admin":
            raise InvalidInput(f"run {run} was submitted by {owner}: only {owner} and the admin can stop it")

    def _get_status(self, peer: int, _: Grant, __: m.GetStatus, ___: object) -> None:
        self._send_status(peer)

    def _send_status(self, peer: int) -> None:
        works = {name: work for run in self._scheduler.runs for name, work in run.works.items() if run.job.takes(name)}
        status = ClusterStatus(
            address=self.address,
            nodes=self._nodes.status(works, self._config.clock()),
            runs=tuple(run.status for run in self._scheduler.runs),
            invitations=self._effects.invitations.status(),
        )
        self._send(peer, m.StatusReply(), (encode_status(status),))

    def _examine(self, peer: int, grant: Grant, header: ExamineNodes, buffers: Sequence[memoryview]) -> None:
        busy = next((run.name for run in self._scheduler.runs if not run.job.rests), "")
        submitter = self._effects.invitations.submitter_of(grant)
        self._examinations.ask(peer, header, buffers, submitter, busy, self._config.clock())

    def _shut_down(self, peer: int, _: Grant, __: m.ShutDown, ___: object) -> None:
        self.is_ending = True
        self._send_status(peer)


COMMANDS: dict[type[Header], Callable[[CommandHandlers, int, Grant, Any, Any], None]] = {
    m.BlobChunk: CommandHandlers._chunk,
    m.SubmitRun: CommandHandlers._submit,
    m.WatchRun: CommandHandlers._watch,
    m.StopRun: CommandHandlers._stop,
    m.AssignNodes: CommandHandlers._assign,
    m.GetStatus: CommandHandlers._get_status,
    m.ExpelNode: CommandHandlers._expel,
    m.ReleaseNode: CommandHandlers._release,
    m.ForgetNode: CommandHandlers._forget,
    m.ShutDown: CommandHandlers._shut_down,
    Invite: CommandHandlers._invite,
    RevokeInvitation: CommandHandlers._revoke,
    ExamineNodes: CommandHandlers._examine,
}
"""Handlers by type of message."""
