"""Invitations: revocable tokens with an end, for one node, for several, or for a submitter with a name.

A node that joined with an invitation can reconnect with it while it is a member. The end of an invitation, its
revocation and its number of nodes limit first uses only. The token is derived from the master's secret and the
invitation's name, and is not saved.
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
from evener.wire.identity import ROLES, Grant, Identity, Token

ASK_FOR_ANOTHER = "ask the master's administrator for another one (`evener invite`)"
MAX_INVITATIONS = 256
"""Limit of invitations: each is tried on every peer that connects."""


class Invitation(Part, frozen=True, kw_only=True):
    """One invitation.

    Attributes:
        submitter: name of a submitter of runs; empty if nodes may join with it.
        nodes: number of nodes that may join with it.
        until: seconds since 1970, the end of first uses.
        is_revoked: whether first uses are no longer allowed.
    """

    submitter: Word = ""
    nodes: Count = 1
    until: Finite
    is_revoked: bool = False


class InvitationList(Noun, frozen=True, kw_only=True):
    """All invitations, by name."""

    invitations: Annotated[dict[Word, Invitation], Meta(max_length=MAX_INVITATIONS)] = {}


class Invitations:
    """The invitations of a master.

    Args:
        path: file of the invitations.
        identity: identity of the master.
        members: nodes that the master knows.
        tokens: accepted tokens by what they allow; kept up to date.
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
        """Load the invitations of the last master of this state folder. Raises InvalidInput: the file is damaged."""
        if self._path.exists():
            self._invitations = dict(read_noun(self._path, InvitationList).invitations)
        for name in self._invitations:
            self._tokens[self._grant(name)] = self._identity.token_of_invitation(name)

    def invite(self, submitter: str, nodes: int, seconds: float) -> tuple[str, Token]:
        """Make an invitation; return its name and its token.

        Raises:
            InvalidValue: `nodes` is not positive, `submitter` is the name of a role, or there are too many invitations.
            OSError: the file cannot be written.
        """
        require(nodes > 0, "nodes", nodes, "one or more")
        allowed = f"another name than {', '.join(ROLES)}, which are those of the tokens in `tokens`"
        require(submitter not in ROLES, "submitter", submitter, allowed)
        self._remove_unusable()
        count = len(self._invitations)
        require(count < MAX_INVITATIONS, "invitations", count + 1, f"at most {MAX_INVITATIONS}; revoke some")
        name = secrets.token_hex(4)
        one = Invitation(submitter=submitter, nodes=nodes, until=self._clock() + seconds)
        self._keep(self._invitations | {name: one})
        token = self._tokens[self._grant(name)] = self._identity.token_of_invitation(name)
        return name, token

    def revoke(self, name: str) -> bool:
        """Revoke an invitation; return whether there is one of this name. Raises OSError."""
        if (one := self._invitations.get(name)) is None:
            return False
        self._keep(self._invitations | {name: replace(one, is_revoked=True)})
        self._remove_unusable()
        return True

    def why_not(self, name: str) -> str:
        """Say why an invitation cannot be used first now; empty if it can."""
        one = self._invitations.get(name)
        if one is None or one.is_revoked:
            return "the invitation was revoked"
        if self._clock() > one.until:
            return "the invitation has expired"
        if not one.submitter and self._members.num_invited(name) >= one.nodes:
            return f"the invitation was for {one.nodes} node{'s' * (one.nodes > 1)}, which have joined"
        return ""

    def why_no_submitter(self, grant: Grant) -> str:
        """Say why a submitter's token no longer allows to submit runs; empty if it does, or is a node's."""
        if grant.role != "submitter" or not grant.invitation or not (reason := self.why_not(grant.invitation)):
            return ""
        return f"{reason}: {ASK_FOR_ANOTHER}"

    def submitter_of(self, grant: Grant) -> str:
        """Return the name under which a token submits runs: the invitation's, or else the role."""
        one = self._invitations.get(grant.invitation)
        return one.submitter if one is not None and one.submitter else grant.role

    def status(self) -> tuple[InvitationStatus, ...]:
        """Return the state of all invitations."""
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

    def _remove_unusable(self) -> None:
        """Remove the invitations with which no node can connect, neither first nor again."""
        unusable = [
            name for name in self._invitations if self.why_not(name) and not self._members.num_invited(name)
        ]  # fmt: skip
        for name in unusable:
            self._tokens.pop(self._grant(name), None)
        if unusable:
            self._keep({name: one for name, one in self._invitations.items() if name not in unusable})

    def _keep(self, invitations: dict[str, Invitation]) -> None:
        write_noun(InvitationList(invitations=invitations), self._path)
        self._path.chmod(0o600)
        self._invitations = invitations
