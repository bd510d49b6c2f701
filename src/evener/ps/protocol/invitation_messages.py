"""Messages about invitations, between an admin and the master."""

from __future__ import annotations

from evener.ps.protocol.messages import Header
from evener.records.schema import Count, Seconds, Text, Word


class Invite(Header, frozen=True, kw_only=True):
    """An admin asks for a token for another user.

    Attributes:
        submitter: name of a submitter of runs; empty for a token of nodes.
        nodes: number of nodes that may join with the token.
        seconds: time within which it has to be used first.
    """

    submitter: Word = ""
    nodes: Count = 1
    seconds: Seconds


class Invited(Header, frozen=True, kw_only=True):
    """The new token.

    Attributes:
        invitation: name of the invitation, to revoke it by.
        token: token as text.
    """

    invitation: Word
    token: Text


class RevokeInvitation(Header, frozen=True, kw_only=True):
    """An admin revokes a token; nodes that have joined with it stay."""

    invitation: Word
