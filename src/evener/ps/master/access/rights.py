"""Rights: the messages that the token of each role allows, and the messages that the audit log records."""

from __future__ import annotations

from evener.ps.protocol import messages as m
from evener.ps.protocol.examination_messages import ExamineNodes
from evener.ps.protocol.messages import Header, Invite, RevokeInvitation
from evener.wire.identity import Role

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
    m.ForgetNode: ("admin",),
    m.ShutDown: ("admin",),
    Invite: ("admin",),
    RevokeInvitation: ("admin",),
}
"""Roles that may send a message; messages that are not listed come from nodes."""
AUDITED: dict[type[Header], str] = {
    m.SubmitRun: "submitted",
    m.StopRun: "asked to stop",
    m.AssignNodes: "assigned nodes",
    ExamineNodes: "had the nodes looked at",
    m.ExpelNode: "asked to expel",
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
