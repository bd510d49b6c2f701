"""The interface of transports, which carry frames over a socket, and the plain transport; `tls.py` has the other one.

Sending never blocks; receiving blocks if the socket does. Both raise BlockingIOError if nothing can be done now, or if
the timeout of a blocking socket has passed. Any other OSError means that the connection is broken.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evener.wire.sockets import (
    MAX_VIEWS,
    READABLE,
    SENDS_MANY,
    UNIX,
    WITHOUT_BLOCKING,
    WRITABLE,
    SelectPoll,
    unacknowledged_bytes,
)

CHUNK = 1 << 20
"""Bytes that are received or encrypted at once: few calls, and they still fit the cache of a core."""
TURN_SECONDS = 0.05
"""Seconds for which sockets that are not urgent are served before urgent ones are polled again."""
_UNIX_BUFFER_BYTES = 1 << 20


class NotTls(ConnectionError):
    """Raised if the peer's first bytes are not TLS.

    Args:
        first_bytes: The bytes that it sent.
    """

    def __init__(self, first_bytes: bytes) -> None:
        super().__init__(f"it does not use TLS: it sent {first_bytes!r}")
        self.first_bytes = first_bytes


def explain(error: OSError) -> str:
    """Return the system's, or OpenSSL's, description of an error."""
    reason = getattr(error, "reason", None)  # of OpenSSL's errors
    return f"TLS: {reason.replace('_', ' ').lower()}" if isinstance(reason, str) else error.strerror or str(error)


def tune(sock: socket.socket, patience: float) -> None:
    """Set the options of a connected socket: no delayed small segments, and detection of dead peers.

    The system adapts TCP's buffers to the link, which a fixed size would switch off. Unix sockets have no such
    adaptation, and get the largest buffers that the system allows.
    """
    if sock.family == UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(patience / 3))
    for option, value in (("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", seconds), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Transport(Protocol):
    """The interface to send and receive the bytes of one connection.

    Attributes:
        sock: The socket.
        wire_bytes_sent: Bytes handed to the kernel.
        wire_bytes_received: Bytes taken from the kernel.
    """

    sock: socket.socket
    wire_bytes_sent: int
    wire_bytes_received: int

    @property
    def has_unsent(self) -> bool:
        """Whether bytes from the caller wait for the kernel."""

    @property
    def has_unread(self) -> bool:
        """Whether bytes from the kernel wait for the caller."""

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that the peer has not confirmed; see `sockets.unacknowledged_bytes`."""

    def handshake(self) -> None:
        """Agree on keys; call again after BlockingIOError.

        Raises:
            NotTls: The peer does not use TLS.
        """

    def receive_into(self, view: memoryview) -> int:
        """Fill the front of `view` with at least one byte; return their number, 0 if the peer has closed."""

    def send(self, views: Sequence[memoryview]) -> int:
        """Take bytes from the front of `views`; return their number. The memory may change afterwards."""

    def flush(self) -> None:
        """Hand unsent bytes to the kernel."""


class PlainTransport:
    """A transport without encryption."""

    has_unsent = False
    has_unread = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.wire_bytes_sent = self.wire_bytes_received = 0

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that the peer has not confirmed."""
        return unacknowledged_bytes(self.sock)

    def handshake(self) -> None:
        """Do nothing, as there are no keys."""

    def receive_into(self, view: memoryview) -> int:
        """Fill the front of `view` with received bytes; return their number."""
        count = self.sock.recv_into(view, CHUNK if len(view) > CHUNK else 0)
        self.wire_bytes_received += count
        return count

    def send(self, views: Sequence[memoryview]) -> int:
        """Send bytes from the front of `views`; return their number."""
        if SENDS_MANY:
            few = views if len(views) <= MAX_VIEWS else views[:MAX_VIEWS]
            count = self.sock.sendmsg(few, (), WITHOUT_BLOCKING)
        else:
            count = self.sock.send(next((view for view in views if view), views[0]), WITHOUT_BLOCKING)
        self.wire_bytes_sent += count
        return count

    def flush(self) -> None:
        """Do nothing, as no bytes wait."""


class Poller:
    """Calls a function for each socket that is ready, with the system's fastest means.

    A call of `run` serves urgent sockets first, and the others for `TURN_SECONDS` or until the caller has enough.
    Sockets that were not served come first in the next call.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._urgent: set[int] = set()
        self._postponed: set[int] = set()
        self._poll: Any
        if hasattr(select, "epoll"):
            self._poll = select.epoll()
            self._wait: Callable[[float], list[tuple[int, int]]] = self._poll.poll
        elif hasattr(select, "poll"):
            self._poll = poll = select.poll()
            self._wait = lambda seconds: poll.poll(1000 * seconds)
        else:
            self._poll = SelectPoll()
            self._wait = self._poll.poll

    def watch(self, sock: socket.socket, handler: Callable[[int], None], *, is_urgent: bool = False) -> None:
        """Call `handler` with the events when `sock` becomes readable or breaks."""
        self._handlers[sock.fileno()] = handler
        if is_urgent:
            self._urgent.add(sock.fileno())
        self._poll.register(sock, READABLE)

    def watch_writing(self, sock: socket.socket, wanted: bool) -> None:
        """Set whether the handler of `sock` is also called when it is writable."""
        self._poll.modify(sock, READABLE | (WRITABLE if wanted else 0))

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket, which is still open."""
        del self._handlers[sock.fileno()]
        self._urgent.discard(sock.fileno())
        self._postponed.discard(sock.fileno())
        self._poll.unregister(sock)

    def run(self, seconds: float, has_enough: Callable[[], bool]) -> None:
        """Wait up to `seconds` for the first socket, and call the handlers of those that are ready."""
        handlers, urgent, postponed = self._handlers, self._urgent, self._postponed
        ready = self._wait(seconds)
        if len(ready) > 1:
            ready.sort(key=lambda one: (one[0] not in urgent, one[0] not in postponed))
        until = time.monotonic() + TURN_SECONDS
        for descriptor, events in ready:
            if descriptor not in urgent and descriptor in handlers:
                if has_enough() or time.monotonic() > until:
                    postponed.add(descriptor)
                    continue
                postponed.discard(descriptor)
            if (handler := handlers.get(descriptor)) is not None:  # otherwise an earlier handler has removed it
                handler(events)

    def close(self) -> None:
        """Remove all sockets and close the poller."""
        self._handlers.clear()
        if hasattr(self._poll, "close"):
            self._poll.close()
