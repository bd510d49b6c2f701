"""Why a connection, a frame or a token is refused: one type and one sentence for each reason.

EvenerError
|- InvalidInput: BadToken, CannotListen
|- BadFrame
`- NodeLost
   |- ConnectionLost
   `- CannotJoin: CannotResolve, NothingListens, NoAnswer, NotAMaster, TransportDiffers, VersionDiffers, OtherMaster,
                  WrongSecret, MasterFull
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from evener.records.errors import EvenerError, InvalidInput, NodeLost
from evener.records.schema import shown


class BadToken(InvalidInput):
    """A token is mistyped, cut short or of another version."""


class CannotListen(InvalidInput):
    """The master cannot listen at an address; names it and says why."""


class BadFrame(EvenerError):
    """What arrived is not the frame that was due, or exceeds a limit; the connection is closed.

    Args:
        sentence: what is wrong; what it repeats of the frame is made printable.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(shown(sentence))


class ConnectionLost(NodeLost):
    """A connection ended, broke, or made no progress within the patience; names the peer.

    Args:
        sentence: what happened.
        said: why the peer closed the connection, in its own words; empty if it did not say.
        unread: headers of the frames that came before that, and that `receive` cannot return any more.
    """

    said: str = ""
    unread: tuple[object, ...] = ()

    def __init__(self, sentence: str, said: str = "", unread: Sequence[object] = ()) -> None:
        super().__init__(sentence)
        self.said, self.unread = said, tuple(unread)


class CannotJoin(NodeLost):
    """No connection to the master.

    Args:
        place: the master's machine and port, in words.
        detail: what was seen, in brackets behind the rule; may be empty.
    """

    rule: ClassVar[str] = "the system refuses"
    cure: ClassVar[str] = "see the reason"
    lasting: ClassVar[bool] = False
    """Whether trying again cannot help."""
    place: str = ""
    detail: str = ""

    def __init__(self, place: str, detail: str = "") -> None:
        seen = f" ({detail})" if detail else ""
        super().__init__(f"cannot join the master at {place}: {self.rule}{seen}; {self.cure}")
        self.place, self.detail = place, detail


class CannotResolve(CannotJoin):
    """The master's name is not known here."""

    rule = "no machine of that name is known here"
    cure = "check the spelling, or give its IP address"


class NothingListens(CannotJoin):
    """The machine answers, but nobody listens at that port."""

    rule = "the machine is there, but nothing listens at that port"
    cure = "start `evener up` on it, or check the port"


class NoAnswer(CannotJoin):
    """Nothing comes back at all."""

    rule = "no answer"
    cure = "check the address, and let the master's firewall pass TCP connections to that port"


class NotAMaster(CannotJoin):
    """Somebody answers, but not as a master does."""

    rule = "what answers there is not an Evener master"
    cure = "check the port; `evener up` prints the right one"


class TransportDiffers(CannotJoin):
    """One side speaks TLS, the other does not."""

    rule = "one side speaks TLS and the other does not"
    cure = "use the token that the running master printed; it says whether it runs with --insecure"
    lasting = True


class VersionDiffers(CannotJoin):
    """The master speaks another version of the wire."""

    rule = "it speaks another version of the wire"
    cure = "install the same version of Evener on both machines"
    lasting = True


class OtherMaster(CannotJoin):
    """The certificate shown is not the one whose fingerprint the token carries."""

    rule = "its certificate is not the one of the token: a token of another master, or somebody in between"
    cure = "copy the token that this master printed"
    lasting = True


class WrongSecret(CannotJoin):
    """Master and token do not share a secret."""

    rule = "it does not know this token's secret"
    cure = "copy the token that this master printed"
    lasting = True


class MasterFull(CannotJoin):
    """The master has as many connections as it may have."""

    rule = "it has as many connections as it may have"
    cure = "raise its limit, or let another node leave first"
