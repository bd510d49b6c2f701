"""What has to leave, in order, until the master hands it to the sockets: nobody else here knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evener.ps.messages import Header
from evener.wire.frame import Buffer


class Outgoing(NamedTuple):
    """A message for a connection; or the end of it, with a reason, if there is no header."""

    peer: int
    header: Header | None
    buffers: Sequence[Buffer] = ()
    reason: str = ""


class Outbox:
    """Messages in the order in which they are to leave."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []

    def send(self, peer: int | None, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Have a message sent; to nobody if there is no connection."""
        if peer is not None:
            self._messages.append(Outgoing(peer, header, buffers))

    def disconnect(self, peer: int, reason: str) -> None:
        """Have a connection closed."""
        self._messages.append(Outgoing(peer, None, (), reason))

    def drain(self) -> list[Outgoing]:
        """All that has to leave now; forgotten here."""
        messages, self._messages = self._messages, []
        return messages
