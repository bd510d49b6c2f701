"""Bytes through a socket, plain: what frames are sent through, and what `tls.py` does encrypted.

A channel works on blocking sockets (its calls then raise TimeoutError when the socket's time limit is over) and on
non-blocking ones (they raise BlockingIOError when nothing can be done now). Any other OSError means that it is broken.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

CHUNK = 1 << 20
"""Bytes that are received or encrypted at once: few calls, and still what a core's cache holds."""
_MOST_VIEWS = 1024
"""Of one sendmsg; POSIX systems take that many."""


class NotTls(ConnectionError):
    """The peer's first bytes are not of TLS.

    Args:
        first_bytes: that it sent.
    """

    def __init__(self, first_bytes: bytes) -> None:
        super().__init__(f"it does not speak TLS, it began with {first_bytes!r}")
        self.first_bytes = first_bytes


def why(error: OSError) -> str:
    """What the system, or OpenSSL, says about a broken connection, in words."""
    reason = getattr(error, "reason", None)  # of OpenSSL's errors
    return f"TLS: {reason.replace('_', ' ').lower()}" if isinstance(reason, str) else error.strerror or str(error)


class Channel(Protocol):
    """Bytes in and out of one connection.

    Attributes:
        sock: the socket, whose time limit says how calls wait.
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


class PlainChannel:
    """A channel without encryption."""

    has_unsent = False
    has_unread = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.wire_bytes_sent = self.wire_bytes_received = 0

    def handshake(self) -> None:
        """Nothing to agree upon."""

    def receive_into(self, view: memoryview) -> int:
        """See `Channel`."""
        count = self.sock.recv_into(view if len(view) <= CHUNK else view[:CHUNK])
        self.wire_bytes_received += count
        return count

    def send(self, views: Sequence[memoryview]) -> int:
        """See `Channel`."""
        count = self.sock.sendmsg(views if len(views) <= _MOST_VIEWS else views[:_MOST_VIEWS])
        self.wire_bytes_sent += count
        return count

    def flush(self) -> None:
        """Nothing is ever unsent."""
