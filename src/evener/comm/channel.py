"""One connection of the mesh: messages with their lengths, numbered and signed, so that nobody in between adds one.

    length (4 bytes) | message | the first 16 bytes of HMAC-SHA256(key, side, number, message)

The key is made of the ranks' secret and of the fresh random numbers of the greeting, so a message is worth nothing in
another connection, at another place of this one, or sent back to its sender. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time

_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<BQ")
_TAG_BYTES = 16


class Channel:
    """One end; one thread may send while another one receives.

    Args:
        sock: connected, on which both have proved the secret.
        key: of this connection.
        is_caller: whether this end has called; the other one has not.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_caller: bool) -> None:
        self.sock, self._key = sock, key
        self._side, self._other = (1, 2) if is_caller else (2, 1)
        self._sent = self._received = 0

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError."""
        tag = self._tag(self._side, self._sent, message)
        self._sent += 1
        self.sock.sendall(_LENGTH.pack(len(message)) + message + tag)

    def receive(self, deadline: float | None = None) -> bytes:
        """The next message. Raises OSError: the connection ended, or what came was not signed by the other end."""
        (length,) = _LENGTH.unpack(read(self.sock, _LENGTH.size, deadline))
        signed = read(self.sock, length + _TAG_BYTES, deadline)
        message = bytes(memoryview(signed)[:length])
        if not hmac.compare_digest(signed[length:], self._tag(self._other, self._received, message)):
            raise ConnectionError("a message came that it has not signed")
        self._received += 1
        return message

    def _tag(self, side: int, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, _PLACE.pack(side, number) + message, "sha256")[:_TAG_BYTES]


def read(peer: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """Exactly `count` bytes. Raises OSError if the connection ends before, or the deadline is over."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        if deadline is not None:  # however slowly bytes drip
            peer.settimeout(max(1e-3, deadline - time.monotonic()))
        got = peer.recv_into(view[done:])
        if got == 0:
            raise ConnectionError("the connection was closed")
        done += got
    return buffer
