"""Bytes through a socket, plain: what frames are sent through, and what `tls.py` does encrypted.

Sending never waits, receiving waits if the socket blocks. Both raise BlockingIOError when nothing can be done now, or
when the patience of a blocking socket is over. Any other OSError means that the connection is broken.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Protocol

CHUNK = 1 << 20
"""Bytes that are received or encrypted at once: few calls, and still what a core's cache holds."""
TURN_SECONDS = 0.05
"""For which sockets that are not urgent are served before urgent ones are looked at again."""
_MOST_VIEWS = 1024
"""Of one sendmsg; POSIX systems take that many."""
_UNIX_BUFFER_BYTES = 1 << 20
_TIMEVAL = struct.Struct("ll")
_COUNT = struct.Struct("i")


class NotTls(ConnectionError):
    """The peer's first bytes are not of TLS.

    Args:
        first_bytes: that it sent.
    """

    def __init__(self, first_bytes: bytes) -> None:
        super().__init__(f"it does not speak TLS, it began with {first_bytes!r}")
        self.first_bytes = first_bytes


def explain(error: OSError) -> str:
    """What the system, or OpenSSL, says about a broken connection, in words."""
    reason = getattr(error, "reason", None)  # of OpenSSL's errors
    return f"TLS: {reason.replace('_', ' ').lower()}" if isinstance(reason, str) else error.strerror or str(error)


def tune(sock: socket.socket, patience: float) -> None:
    """Set the options of a connected socket: no delayed small segments, dead peers noticed by the system.

    TCP's buffers stay with the system, which fits them to the link; a fixed size would switch that off. Unix sockets
    have no such thing and are given what the system allows.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(patience / 3))
    for option, value in (("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", seconds), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def block_for(sock: socket.socket, seconds: float) -> None:
    """Have `sock` block, receiving for at most `seconds`: the system keeps time, which saves a call for each wait."""
    whole = int(seconds)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, int(1e6 * (seconds - whole))))


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Bytes that the system has taken and the peer has not confirmed; 0 where nobody tells.

    A socket takes a large piece at once and then none for as long as a slow line needs for a part of it: what shows
    that the line lives is that this number falls.
    """
    try:
        return int(_COUNT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    except OSError:
        return 0


class Transport(Protocol):
    """Bytes in and out of one connection.

    Attributes:
        sock: the socket.
        wire_bytes_sent: handed to the kernel.
        wire_bytes_received: taken from the kernel.
    """

    sock: socket.socket
    wire_bytes_sent: int
    wire_bytes_received: int

    @property
    def has_unsent(self) -> bool:
        """Whether bytes that were taken from the caller still wait for the kernel."""

    @property
    def has_unread(self) -> bool:
        """Whether bytes that were taken from the kernel still wait for the caller."""

    @property
    def unacknowledged_bytes(self) -> int:
        """See the function of that name."""

    def handshake(self) -> None:
        """Agree upon keys; call again after BlockingIOError.

        Raises:
            NotTls: the peer does not begin with TLS.
        """

    def receive_into(self, view: memoryview) -> int:
        """Fill the front of `view` with what is there, at least one byte; 0 if the peer will send nothing more."""

    def send(self, views: Sequence[memoryview]) -> int:
        """Take bytes from the front of `views`; how many. Their memory is not referred to afterwards."""

    def flush(self) -> None:
        """Hand what is unsent to the kernel."""


class PlainTransport:
    """A transport without encryption."""

    has_unsent = False
    has_unread = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.wire_bytes_sent = self.wire_bytes_received = 0

    @property
    def unacknowledged_bytes(self) -> int:
        """See `Transport`."""
        return unacknowledged_bytes(self.sock)

    def handshake(self) -> None:
        """Nothing to agree upon."""

    def receive_into(self, view: memoryview) -> int:
        """See `Transport`."""
        count = self.sock.recv_into(view, CHUNK if len(view) > CHUNK else 0)
        self.wire_bytes_received += count
        return count

    def send(self, views: Sequence[memoryview]) -> int:
        """See `Transport`."""
        few = views if len(views) <= _MOST_VIEWS else views[:_MOST_VIEWS]
        count = self.sock.sendmsg(few, (), socket.MSG_DONTWAIT)
        self.wire_bytes_sent += count
        return count

    def flush(self) -> None:
        """Nothing is ever unsent."""


class Poller:
    """Calls a function of each socket that is ready, by the system's fastest means.

    A call of `run` serves the sockets that are watched as urgent first, and the others for `TURN_SECONDS`, or until the
    caller has enough. The rest waits for the next call, in which it comes first.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._urgent: set[int] = set()
        self._postponed: set[int] = set()
        if hasattr(select, "epoll"):
            self._poll: select.epoll | select.poll = select.epoll()
            self._wait: Callable[[float], list[tuple[int, int]]] = self._poll.poll
        else:
            self._poll = poll = select.poll()
            self._wait = lambda seconds: poll.poll(1000 * seconds)

    def watch(self, sock: socket.socket, handler: Callable[[int], None], *, is_urgent: bool = False) -> None:
        """Have `handler` called with the events when `sock` can be read from, or is broken."""
        self._handlers[sock.fileno()] = handler
        if is_urgent:
            self._urgent.add(sock.fileno())
        self._poll.register(sock, select.POLLIN)

    def watch_writing(self, sock: socket.socket, wanted: bool) -> None:
        """Have the handler of `sock` called too when it can be written to, or not any more."""
        self._poll.modify(sock, select.POLLIN | (select.POLLOUT if wanted else 0))

    def forget(self, sock: socket.socket) -> None:
        """Leave a socket, which is still open, alone."""
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
            if (handler := handlers.get(descriptor)) is not None:  # else forgotten by one that came before
                handler(events)

    def close(self) -> None:
        """Let go of everything."""
        self._handlers.clear()
        if hasattr(self._poll, "close"):
            self._poll.close()
