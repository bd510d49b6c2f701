"""What an admin and the master tell each other about invitations."""

from __future__ import annotations

from evener.ps.protocol.messages import Header
from evener.records.schema import Count, Seconds, Text, Word


class Invite(Header, frozen=True, kw_only=True):
    """An admin wants a token for somebody.

    Attributes:
        submitter: name of who may submit runs with it; empty: nodes may join with it.
        nodes: that may join with it.
        seconds: for which it can be used first.
    """

    submitter: Word = ""
    nodes: Count = 1
    seconds: Seconds


class Invited(Header, frozen=True, kw_only=True):
    """The token.

    Attributes:
        invitation: by which it can be revoked.
        token: as text.
    """

    invitation: Word
    token: Text


class RevokeInvitation(Header, frozen=True, kw_only=True):
    """An admin wants a token to be worth nothing any more; nodes that have joined with it stay."""

    invitation: Word
