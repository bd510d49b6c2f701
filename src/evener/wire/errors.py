"""Errors of connections, frames and tokens: one type and one sentence for each reason.

EvenerError
|- InvalidInput: BadToken, CannotListen
|- BadFrame
`- NodeLost
   |- ConnectionLost
   |- CannotRelay
   `- CannotJoin: CannotResolve, NothingListens, NoUnixSockets, NoAnswer, NotAMaster (NoMaster), TransportDiffers,
                  VersionDiffers, OtherMaster, WrongSecret, MasterFull
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from evener.records.errors import EvenerError, InvalidInput, NodeLost
from evener.records.schema import shown


class BadToken(InvalidInput):
    """Raised if a token is mistyped, incomplete or of another version."""


class CannotListen(InvalidInput):
    """Raised if the master cannot listen at an address; gives the address and the reason."""


class BadFrame(EvenerError):
    """Raised if received bytes are not the expected frame, or exceed a limit; the connection is closed.

    Args:
        sentence: What is wrong; text from the frame is made printable.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(shown(sentence))


class ConnectionLost(NodeLost):
    """Raised if a connection ended, broke, or made no progress within the patience; names the peer.

    Args:
        sentence: What happened.
        peer_reason: The peer's reason for closing the connection; empty if it gave none.
        unread: Headers of earlier frames, which `receive` cannot return any more.
    """

    peer_reason: str = ""
    unread: tuple[object, ...] = ()

    def __init__(self, sentence: str, peer_reason: str = "", unread: Sequence[object] = ()) -> None:
        super().__init__(sentence)
        self.peer_reason, self.unread = peer_reason, tuple(unread)


class CannotRelay(NodeLost):
    """Raised if a master cannot be reached through a relay.

    Args:
        place: Description of the relay's host and port.
        reason: Why, and what to do.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"cannot reach the relay at {place}: {reason}")


class CannotJoin(NodeLost):
    """Raised if there is no connection to the master.

    Args:
        place: Description of the master's host and port.
        detail: Observation, in brackets after the rule; may be empty.
    """

    rule: ClassVar[str] = "the system refuses"
    cure: ClassVar[str] = "see the reason"
    lasting: ClassVar[bool] = False
    """Whether retrying is useless."""
    place: str = ""
    detail: str = ""

    def __init__(self, place: str, detail: str = "") -> None:
        seen = f" ({detail})" if detail else ""
        super().__init__(f"cannot reach the master at {place}: {self.rule}{seen}; {self.cure}")
        self.place, self.detail = place, detail


class CannotResolve(CannotJoin):
    """Raised if the master's host name is unknown."""

    rule = "the host name is unknown here"
    cure = "check the spelling, or give its IP address"


class NothingListens(CannotJoin):
    """Raised if the machine answers, but no process listens at the port."""

    rule = "the machine is there, but nothing listens at that port"
    cure = "start `evener up` on it, or check the port"


class NoUnixSockets(CannotJoin):
    """Raised if the address is a path, and this system is one without Unix sockets, such as Windows."""

    rule = "this system has no Unix sockets"
    cure = "give the master's host and port"
    lasting = True


class NoAnswer(CannotJoin):
    """Raised if no answer comes back."""

    rule = "no answer"
    cure = "check the address, and let the master's firewall pass TCP connections to that port"


class NotAMaster(CannotJoin):
    """Raised if another program than a master answers."""

    rule = "the program at that port is not an Evener master"
    cure = "check the port; `evener up` prints the right one"


class NoMaster(NotAMaster):
    """Raised if a relay answers that no master is connected to it."""

    rule = "it is a relay, and no master is connected to it"
    cure = "type `evener up --relay` with this address on the master's machine"


class TransportDiffers(CannotJoin):
    """Raised if one side uses TLS and the other does not."""

    rule = "one side uses TLS and the other does not"
    cure = "use the token that the running master printed; it says whether it runs with --insecure"
    lasting = True


class VersionDiffers(CannotJoin):
    """Raised if the master uses another protocol version."""

    rule = "it uses another protocol version"
    cure = "install the same version of Evener on both machines"
    lasting = True


class OtherMaster(CannotJoin):
    """Raised if the certificate does not have the fingerprint of the token."""

    rule = "its certificate does not match the token: the token is of another master, or the connection is intercepted"
    cure = "copy the token that this master printed"
    lasting = True


class WrongSecret(CannotJoin):
    """Raised if master and token do not share a secret."""

    rule = "it does not know this token's secret"
    cure = (
        "copy the token that this master printed; an invitation may have been revoked or have expired: ask the "
        "master's administrator for another one (`evener invite`)"
    )
    lasting = True


class MasterFull(CannotJoin):
    """Raised if the master has reached its limit of connections."""

    rule = "it has reached its limit of connections"
    cure = "raise its limit, or let another node leave first"
