"""Who may come in: accepts connections, hears strangers out for a few seconds, and keeps floods of them bounded."""

from __future__ import annotations

import secrets
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from evener.wire.address import Address
from evener.wire.channel import Channel, PlainChannel
from evener.wire.greeting import NONCE_BYTES, MasterGreeting
from evener.wire.identity import Identity
from evener.wire.limits import Limits
from evener.wire.sockets import close_door, open_door, tune
from evener.wire.stranger import Stranger

if TYPE_CHECKING:
    import ssl

_MAPPED = "::ffff:"


class Doorkeeper:
    """The listening sockets of a hub, and the connections that have not proved the secret yet.

    Args:
        identity: of this master.
        limits: how many strangers there may be, and how long each of them.
        selector: of the hub, in which sockets are registered with a function to call.
        is_full: whether nobody more may be welcomed.
        welcome: told the channel and origin of everybody who has proved the secret.
        refuse: told origin and reason of everybody who has not.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        selector: selectors.BaseSelector,
        is_full: Callable[[], bool],
        welcome: Callable[[Channel, str], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._token, self._limits, self._selector = identity.token, limits, selector
        self._is_full, self._welcome, self._refuse = is_full, welcome, refuse
        self._context = _context(identity)
        self._doors: list[socket.socket] = []
        self._resting: list[socket.socket] = []
        self._strangers: dict[Stranger, None] = {}  # in order of arrival

    def open(self, address: Address) -> Address:
        """Listen at `address`; the address with the port that it really has.

        Raises:
            CannotListen: that is not possible.
        """
        door, real = open_door(address)
        self._doors.append(door)
        self._watch(door)
        return real

    def tick(self, seconds: float) -> None:
        """Let `seconds` of listening pass: strangers grow older, doors that had to rest open again."""
        for door in self._resting:
            self._watch(door)
        self._resting.clear()
        for stranger in list(self._strangers):
            stranger.age += seconds
            if stranger.age > self._limits.greeting_seconds:
                self._send_away(stranger, f"it did not prove the secret within {self._limits.greeting_seconds:g} s")

    def close(self) -> None:
        """Close all doors and send all strangers away."""
        for door in self._doors:
            if door not in self._resting:
                self._selector.unregister(door)
            close_door(door)
        for stranger in list(self._strangers):
            self._send_away(stranger, "the master closes")

    def _watch(self, door: socket.socket) -> None:
        self._selector.register(door, selectors.EVENT_READ, partial(self._answer, door))

    def _answer(self, door: socket.socket, _: int) -> None:
        """Let in who waits at a door, a few at a time."""
        for _ in range(1 + self._limits.strangers // 8):  # so that each is heard before many others have come
            try:
                sock, where = door.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptors or memory left: the door stays readable, so look away for a while
                self._selector.unregister(door)
                self._resting.append(door)
                return
            self._let_in(sock, _origin(door, where))

    def _let_in(self, sock: socket.socket, origin: Address) -> None:
        if len(self._strangers) >= self._limits.strangers:
            self._send_away(least_likely(self._strangers), "too many others came who did not prove the secret either")
        sock.setblocking(False)
        try:
            tune(sock, self._limits.patience)
        except OSError:  # it has left already
            sock.close()
            return
        stranger = Stranger(self._channel(sock), MasterGreeting(self._token, secrets.token_bytes(NONCE_BYTES)), origin)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, stranger))

    def _channel(self, sock: socket.socket) -> Channel:
        if self._context is None:
            return PlainChannel(sock)
        from evener.wire.tls import TlsChannel

        return TlsChannel(sock, self._context, is_master=True)

    def _hear(self, stranger: Stranger, _: int) -> None:
        if stranger not in self._strangers:  # sent away since the selector said that it has spoken
            return
        reply = stranger.advance(full=self._is_full())
        if reply is None:
            return
        if not reply.welcome:
            self._send_away(stranger, reply.refusal)
            return
        del self._strangers[stranger]
        self._selector.unregister(stranger.channel.sock)
        self._welcome(stranger.channel, stranger.origin.words)

    def _send_away(self, stranger: Stranger, reason: str) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.channel.sock)
        stranger.channel.sock.close()
        self._refuse(stranger.origin.words, reason)


def least_likely(strangers: Collection[Stranger]) -> Stranger:
    """Who is the least likely to be one of ours: of the machine with most strangers, silent, and here for long."""
    crowd = Counter(stranger.origin.host for stranger in strangers)
    return max(strangers, key=lambda s: (crowd[s.origin.host], not s.has_spoken, s.age))


def _context(identity: Identity) -> ssl.SSLContext | None:
    if not identity.certificate:
        return None
    from evener.wire.tls import master_context

    return master_context(identity)


def _origin(door: socket.socket, where: tuple[str, int] | str) -> Address:
    if door.family == socket.AF_UNIX:
        return Address(path=door.getsockname())
    return Address(where[0].removeprefix(_MAPPED), int(where[1]))
