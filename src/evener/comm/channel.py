"""One connection of the mesh, whose messages have a length, a number and a signature against forgery.

    length (4 bytes) | message | the first 16 bytes of HMAC-SHA256(key, side, number, message)

The key is derived from the ranks' secret and the random numbers of the handshake. A message is therefore invalid in
another connection, at another position of this one, or sent back to its sender. Messages are not encrypted.
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
    """One end of a connection; one thread may send while another receives.

    Args:
        sock: connected, after the handshake.
        key: of this connection.
        is_caller: whether this end opened the connection.
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
        """Return the next message. Raises OSError if the connection ended or the signature is wrong."""
        (length,) = _LENGTH.unpack(read(self.sock, _LENGTH.size, deadline))
        signed = read(self.sock, length + _TAG_BYTES, deadline)
        message = bytes(memoryview(signed)[:length])
        if not hmac.compare_digest(signed[length:], self._tag(self._other, self._received, message)):
            raise ConnectionError("a message with a wrong signature arrived")
        self._received += 1
        return message

    def _tag(self, side: int, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, _PLACE.pack(side, number) + message, "sha256")[:_TAG_BYTES]


def read(peer: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """Read exactly `count` bytes. Raises OSError if the connection ends early or the deadline passes."""
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
