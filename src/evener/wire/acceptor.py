"""The acceptor of a server: accepts connections, authenticates pending peers within seconds, and bounds floods."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from evener.wire.errors import CannotListen
from evener.wire.handshake import (
    MAGIC,
    MESSAGE_BYTES,
    NONCE_BYTES,
    HandshakeReply,
    HandshakeType,
    MasterHandshake,
    refuse,
)
from evener.wire.identity import ROLES, Address, Grant, Identity, Token
from evener.wire.limits import Limits
from evener.wire.relay_lines import RelayLines
from evener.wire.sockets import UNIX
from evener.wire.transport import NotTls, PlainTransport, Poller, Transport, explain, tune

_MAPPED = "::ffff:"
_BACKLOG = 256
_READ_BYTES = 4096
"""Bytes read at once. With unread bytes, the system would drop the answer when the socket closes."""


class PendingPeer:
    """A connection that has not proved the secret yet, during its handshake.

    Args:
        transport: A non-blocking transport.
        handshake: The master's side of the handshake.
        origin: The address of the peer.

    Attributes:
        age: Seconds for which the server has listened to it.
    """

    def __init__(self, transport: Transport, handshake: MasterHandshake, origin: Address) -> None:
        self.transport, self.origin, self.age = transport, origin, 0.0
        self._handshake = handshake
        self._has_keys = False
        self._received = b""

    @property
    def has_spoken(self) -> bool:
        """Whether any bytes have been accepted."""
        return self.transport.wire_bytes_received > 0

    def advance(self, is_full: Callable[[Grant], bool]) -> HandshakeReply | None:
        """Process the received bytes. Return the last reply, which is sent already, or None while it is undecided.

        Args:
            is_full: Returns whether no more connections with such a token are accepted.
        """
        try:
            if not self._has_keys:
                self.transport.handshake()
                self._has_keys = True
            while True:
                reply = self._receive(is_full)
                if reply.message:  # forty bytes always fit the empty buffers of a new connection
                    self.transport.send([memoryview(reply.message)])
                if reply.welcome or reply.refusal:
                    return reply
        except BlockingIOError:
            return None
        except NotTls:
            reply = refuse(HandshakeType.TLS_HERE)
            with contextlib.suppress(OSError):  # the peer has closed already
                self.transport.sock.send(reply.message)
            return reply
        except OSError as error:
            return HandshakeReply(b"", refusal=f"the handshake broke off: {explain(error)}")

    def _receive(self, is_full: Callable[[Grant], bool]) -> HandshakeReply:
        """Return the reply to the received bytes, which must be exactly one message."""
        space = memoryview(bytearray(_READ_BYTES))
        count = self.transport.receive_into(space)
        if count == 0:
            return HandshakeReply(b"", refusal="it closed the connection without proving the secret")
        self._received += space[:count]
        if len(self._received) > MESSAGE_BYTES or not MAGIC.startswith(self._received[: len(MAGIC)]):
            return refuse(HandshakeType.NO_HELLO)
        if len(self._received) < MESSAGE_BYTES:
            return HandshakeReply(b"")
        message, self._received = self._received, b""
        return self._handshake.answer(message, is_full)


class Acceptor:
    """The listening sockets of a server, and the connections that have not proved the secret yet.

    Args:
        identity: The identity of this master.
        limits: Limits of the number of pending peers, and of their time.
        poller: The poller of the server.
        is_full: Returns whether no more connections with such a token are accepted.
        welcome: Called with transport, origin and grant of every peer that has proved a secret.
        refuse: Called with origin and reason of every refused peer.

    Attributes:
        others: Tokens other than the admin's, by what they allow; may change at any time.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        poller: Poller,
        is_full: Callable[[Grant], bool],
        welcome: Callable[[Transport, str, Grant], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._token, self._limits, self._poller = identity.token, limits, poller
        self.others: dict[Grant, Token] = {Grant(role): identity.token_of(role) for role in ROLES if role != "admin"}
        self._is_full, self._welcome, self._refuse = is_full, welcome, refuse
        self._wrap = _wrapper(identity)
        self._listeners: list[socket.socket] = []
        self._resting: list[socket.socket] = []
        self._pending: dict[PendingPeer, None] = {}  # in order of arrival
        self._lines: list[RelayLines] = []
        self._waiting: dict[socket.socket, RelayLines] = {}

    def listen(self, address: Address) -> Address:
        """Listen at `address`; return the address with its real port.

        Raises:
            CannotListen: The address is taken, not of this machine, or not allowed.
        """
        try:
            listener = _listen_unix(address.path) if address.path else _listen_tcp(address)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "the host has no valid name"
            raise CannotListen(f"cannot listen at {address.description}: {why or error}") from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._watch(listener)
        return address if address.path else Address(address.host, listener.getsockname()[1])

    def listen_by(self, lines: RelayLines) -> None:
        """Also accept connections that come through a relay; `close` closes its lines."""
        self._lines.append(lines)
        self._poller.watch(lines.signal, partial(self._watch_lines, lines), is_urgent=True)

    def _watch_lines(self, lines: RelayLines, _: int) -> None:
        for sock in lines.opened():
            self._waiting[sock] = lines
            self._poller.watch(sock, partial(self._on_line, sock), is_urgent=True)

    def _on_line(self, sock: socket.socket, _: int) -> None:
        """Let in the node whose first bytes have come, or replace a line that has ended."""
        lines = self._waiting.pop(sock)
        self._poller.forget(sock)
        lines.renew()
        try:
            has_come = bool(sock.recv(1, socket.MSG_PEEK))
        except OSError:
            has_come = False
        if has_come:
            self._let_in(sock, lines.address)
        else:
            sock.close()

    def tick(self, seconds: float) -> None:
        """Let `seconds` of listening pass: pending peers age, and resting listeners are watched again."""
        for listener in self._resting:
            self._watch(listener)
        self._resting.clear()
        for peer in list(self._pending):
            peer.age += seconds
            if peer.age > self._limits.handshake_seconds:
                self._drop(peer, f"it did not prove the secret within {self._limits.handshake_seconds:g} s")

    def close(self) -> None:
        """Stop listening, and refuse all pending peers."""
        for listener in self._listeners:
            if listener not in self._resting:
                self._poller.forget(listener)
            path = listener.getsockname() if listener.family == UNIX else ""
            listener.close()
            if path and os.path.exists(path):
                os.unlink(path)
        for sock in self._waiting:
            self._poller.forget(sock)
            sock.close()
        for lines in self._lines:
            self._poller.forget(lines.signal)
            lines.close()
        for peer in list(self._pending):
            self._drop(peer, "the master closes")

    def _watch(self, listener: socket.socket) -> None:
        self._poller.watch(listener, partial(self._accept, listener), is_urgent=True)

    def _accept(self, listener: socket.socket, _: int) -> None:
        """Accept a few connections of a listener."""
        for _ in range(1 + self._limits.pending // 8):  # so that each is served before many others arrive
            try:
                sock, where = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptors or memory: it stays readable, so ignore it for a while
                self._poller.forget(listener)
                self._resting.append(listener)
                return
            self._let_in(sock, _origin(listener, where))

    def _let_in(self, sock: socket.socket, origin: Address) -> None:
        if len(self._pending) >= self._limits.pending:
            self._drop(least_trusted(self._pending), "too many pending connections have not proved the secret")
        sock.setblocking(False)
        try:
            tune(sock, self._limits.patience)
        except OSError:  # the peer has closed already
            sock.close()
            return
        handshake = MasterHandshake(self._token, secrets.token_bytes(NONCE_BYTES), self.others)
        peer = PendingPeer(self._wrap(sock), handshake, origin)
        self._pending[peer] = None
        self._poller.watch(sock, partial(self._hear, peer), is_urgent=True)

    def _hear(self, peer: PendingPeer, _: int) -> None:
        reply = peer.advance(self._is_full)
        if reply is None:
            return
        if not reply.welcome:
            self._drop(peer, reply.refusal)
            return
        del self._pending[peer]
        self._poller.forget(peer.transport.sock)
        self._welcome(peer.transport, peer.origin.description, reply.grant)

    def _drop(self, peer: PendingPeer, reason: str) -> None:
        del self._pending[peer]
        self._poller.forget(peer.transport.sock)
        peer.transport.sock.close()
        self._refuse(peer.origin.description, reason)


def least_trusted(pending: Collection[PendingPeer]) -> PendingPeer:
    """Return the peer that is least likely a node: from the host with most pending peers, silent, and oldest."""
    crowd = Counter(peer.origin.host for peer in pending)
    return max(pending, key=lambda peer: (crowd[peer.origin.host], not peer.has_spoken, peer.age))


def _wrapper(identity: Identity) -> Callable[[socket.socket], Transport]:
    """Return the function that makes a transport of a socket."""
    if not identity.certificate:
        return PlainTransport
    from evener.wire.tls import TlsTransport, master_context

    return partial(TlsTransport, context=master_context(identity), is_master=True)


def _origin(listener: socket.socket, where: tuple[str, int] | str) -> Address:
    if listener.family == UNIX:
        return Address(path=listener.getsockname())
    return Address(where[0].removeprefix(_MAPPED), int(where[1]))


def _listen_tcp(address: Address) -> socket.socket:
    if address.host in ("", "::"):
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", address.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where, family=family, backlog=_BACKLOG)


def _listen_unix(path: str) -> socket.socket:
    """Return a listening socket at `path`, for this user only.

    A socket that a killed master has left there is removed. The socket of a running master stays, and so does any other
    file.
    """
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # before listening, while connections are impossible
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
