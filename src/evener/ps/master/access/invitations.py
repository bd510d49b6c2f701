"""Invitations: tokens for one node, for several, or for a submitter with a name, with an end, and revocable.

A node that came with an invitation comes back with it for as long as it is a member: the end of an invitation, its
revocation and its number are about who comes for the first time. What a token is made of, the master's secret and the
invitation's name, is not written down with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from evener.ps.master.access.members import Members
from evener.ps.protocol.status import InvitationStatus
from evener.records.errors import require
from evener.records.schema import Count, Finite, Noun, Part, Word, read_noun, write_noun
from evener.wire.identity import Grant, Identity, Token

MOST_INVITATIONS = 256
"""Each is tried on everybody who greets."""


class Invitation(Part, frozen=True, kw_only=True):
    """One.

    Attributes:
        submitter: name of who may submit runs with it; empty: nodes may join with it.
        nodes: that may join with it.
        until: seconds since 1970, when it cannot be used for the first time any more.
        is_revoked: likewise, from now on.
    """

    submitter: Word = ""
    nodes: Count = 1
    until: Finite
    is_revoked: bool = False


class InvitationList(Noun, frozen=True, kw_only=True):
    """All of them, by name."""

    invitations: Annotated[dict[Word, Invitation], Meta(max_length=MOST_INVITATIONS)] = {}


class Invitations:
    """See the first lines.

    Args:
        path: of the file.
        identity: of the master.
        members: the nodes that it knows.
        tokens: that are accepted at the door, by what they allow; kept up to date.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        members: Members,
        tokens: dict[Grant, Token],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._identity, self._members, self._clock = path, identity, members, clock
        self._tokens = tokens
        self._invitations: dict[str, Invitation] = {}

    def load(self) -> None:
        """Remember those of the last master of this home. Raises InvalidInput: the file is damaged."""
        if self._path.exists():
            self._invitations = dict(read_noun(self._path, InvitationList).invitations)
        for name in self._invitations:
            self._tokens[self._grant(name)] = self._identity.token_of_invitation(name)

    def invite(self, submitter: str, nodes: int, seconds: float) -> tuple[str, Token]:
        """A new invitation: its name, and its token.

        Raises:
            InvalidValue: it is for nobody, or there are too many.
            OSError: it cannot be written down.
        """
        require(nodes > 0, "nodes", nodes, "one or more")
        self._forget_the_useless()
        count = len(self._invitations)
        require(count < MOST_INVITATIONS, "invitations", count + 1, f"at most {MOST_INVITATIONS}; revoke some")
        name = secrets.token_hex(4)
        one = Invitation(submitter=submitter, nodes=nodes, until=self._clock() + seconds)
        self._keep(self._invitations | {name: one})
        token = self._tokens[self._grant(name)] = self._identity.token_of_invitation(name)
        return name, token

    def revoke(self, name: str) -> bool:
        """Let nobody come for the first time with an invitation; whether there is one of this name. Raises OSError."""
        if (one := self._invitations.get(name)) is None:
            return False
        self._keep(self._invitations | {name: replace(one, is_revoked=True)})
        self._forget_the_useless()
        return True

    def why_not(self, name: str) -> str:
        """Why nobody may use an invitation for the first time; empty if somebody may."""
        one = self._invitations.get(name)
        if one is None or one.is_revoked:
            return "the invitation was revoked"
        if self._clock() > one.until:
            return "the invitation has expired"
        if not one.submitter and self._members.num_invited(name) >= one.nodes:
            return f"the invitation was for {one.nodes} node{'s' * (one.nodes > 1)}, which came"
        return ""

    def why_no_submitter(self, grant: Grant) -> str:
        """Why a token that allowed to submit runs does not do so any more; empty if it does, or is a node's."""
        return self.why_not(grant.invitation) if grant.role == "submitter" and grant.invitation else ""

    def submitter_of(self, grant: Grant) -> str:
        """What who holds a token is called where it submits: by its invitation, else by its role."""
        one = self._invitations.get(grant.invitation)
        return one.submitter if one is not None and one.submitter else grant.role

    def status(self) -> tuple[InvitationStatus, ...]:
        """All, with how many came by each, and for how long more it can be used first."""
        return tuple(
            InvitationStatus(
                name=name,
                submitter=one.submitter,
                nodes=one.nodes,
                joined=self._members.num_invited(name),
                seconds=0.0 if one.is_revoked else max(0.0, one.until - self._clock()),
            )
            for name, one in self._invitations.items()
        )

    def _grant(self, name: str) -> Grant:
        return Grant("submitter" if self._invitations[name].submitter else "node", name)

    def _forget_the_useless(self) -> None:
        """Forget those that nobody can come with any more, for the first time or again."""
        useless = [
            name for name in self._invitations if self.why_not(name) and not self._members.num_invited(name)
        ]  # fmt: skip
        for name in useless:
            self._tokens.pop(self._grant(name), None)
        if useless:
            self._keep({name: one for name, one in self._invitations.items() if name not in useless})

    def _keep(self, invitations: dict[str, Invitation]) -> None:
        write_noun(InvitationList(invitations=invitations), self._path)
        self._path.chmod(0o600)
        self._invitations = invitations
