"""The format of a frame on the wire: a head with a checksum, then the bytes of tensors as they are in memory.

    head     magic "EVNR" | version 1 B | flags 1 B | number of buffers 2 B | header bytes 4 B | sequence 8 B
             | length of each buffer 8 B | header (msgpack) | CRC-32 of all the head before it 4 B
    payload  buffer 0 | buffer 1 | ...

All integers are little-endian. The sequence counts the frames of one direction of one connection from 0, so that
repeated, lost and reordered frames are detected. The checksum covers the head; TLS protects the payload. Without TLS
the payload has only TCP's 16-bit checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from evener.records.errors import InvalidValue
from evener.wire.limits import Limits

if TYPE_CHECKING:
    from numpy.typing import NDArray

H = TypeVar("H", bound=msgspec.Struct)
Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
"""Contiguous memory. Only its bytes are sent; type and shape belong into the header."""

MAGIC = b"EVNR"
VERSION = 1
DATA, CLOSE = 0, 1
"""Flags: the header has one of the caller's types, or is the reason for closing, as a string."""

PREFIX = struct.Struct("<4sBBHIQ")
PREFIX_BYTES = PREFIX.size
LENGTH_BYTES = 8
CHECKSUM = struct.Struct("<I")
CHECKSUM_BYTES = CHECKSUM.size
_MAX_REASON_LENGTH = 1000
_ENCODER = msgspec.msgpack.Encoder()


class Frame(msgspec.Struct, Generic[H], frozen=True):
    """A message that has arrived completely.

    Attributes:
        header: The header, as it was sent.
        buffers: The memory of the received payload; empty if it was dropped.
    """

    header: H
    buffers: tuple[memoryview, ...]


class Close(msgspec.Struct, frozen=True):
    """The message that the peer closes the connection, for `reason`."""

    reason: str

    @property
    def clause(self) -> str:
        """The reason as a clause."""
        return f"it said: {self.reason}" if self.reason else "it said goodbye"


@lru_cache(maxsize=256)
def front(num_buffers: int) -> struct.Struct:
    """Return the layout of a frame's prefix and the lengths of its buffers."""
    return struct.Struct(f"{PREFIX.format}{num_buffers}Q")


def encode_head(sequence: int, header: bytes, lengths: Sequence[int] = (), flags: int = DATA) -> bytes:
    """Return the head of a frame whose payload has buffers of `lengths` bytes."""
    count = len(lengths)
    head = front(count).pack(MAGIC, VERSION, flags, count, len(header), sequence, *lengths) + header
    return head + CHECKSUM.pack(zlib.crc32(head))


def encode_frame(sequence: int, header: msgspec.Struct, buffers: Sequence[Buffer], limits: Limits) -> list[memoryview]:
    """Return frame number `sequence` of a connection: its head, and views of `buffers`.

    Raises:
        InvalidValue: The frame exceeds a limit of the receiver, or a buffer is not contiguous.
    """
    encoded = _ENCODER.encode(header)
    views = [*map(as_bytes, buffers)]
    lengths = [*map(len, views)]
    if len(encoded) > limits.header_bytes:
        raise InvalidValue("bytes of a header", len(encoded), f"at most {limits.header_bytes}")
    if len(views) > limits.buffers:
        raise InvalidValue("number of buffers", len(views), f"at most {limits.buffers}")
    if (total := sum(lengths)) > limits.frame_bytes:
        raise InvalidValue("bytes of a frame", total, f"at most {limits.frame_bytes}")
    return [memoryview(encode_head(sequence, encoded, lengths)), *views]


def encode_close(sequence: int, reason: str) -> list[memoryview]:
    """Return the last frame of a connection, which gives the reason for closing."""
    return [memoryview(encode_head(sequence, _ENCODER.encode(reason[:_MAX_REASON_LENGTH]), flags=CLOSE))]


def drop_sent(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes of a frame from `views`, and the empty views in front."""
    for whole, view in enumerate(views):
        if count < len(view):
            views[0 : whole + 1] = [view[count:]]
            return
        count -= len(view)
    views.clear()


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the memory of `buffer` as a flat view of bytes, without a copy.

    Raises:
        InvalidValue: The memory is not contiguous.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]  # arrays of NumPy are buffers, too
    if not view.c_contiguous:
        raise InvalidValue("buffer", view.shape, "contiguous in memory")
    return view.cast("B") if view.nbytes else memoryview(b"")


def allocate(_: object, lengths: Sequence[int]) -> list[memoryview]:
    """Return new memory for every buffer: the default place of payload."""
    import numpy as np  # a relay needs neither buffers nor NumPy

    return [np.empty(length, np.uint8).data for length in lengths]  # not zeroed, unlike a bytearray
