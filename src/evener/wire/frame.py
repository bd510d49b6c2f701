"""What a frame looks like on the wire: a head that is checked, then the bytes of tensors as they lie in memory.

    head     magic "EVNR" | version 1 B | flags 1 B | number of buffers 2 B | header bytes 4 B | sequence 8 B
             | length of each buffer 8 B | header (msgpack) | CRC-32 of all the head before it 4 B
    payload  buffer 0 | buffer 1 | ...

All integers are little-endian. The sequence counts the frames of one direction of one connection from 0, so that a
frame that was repeated, left out or moved is noticed. The checksum covers the head; that the payload is what was sent
is TLS's promise. Without TLS the payload has TCP's own 16-bit checksum and nothing else.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from evener.records.errors import InvalidValue
from evener.wire.limits import Limits

H = TypeVar("H", bound=msgspec.Struct)
Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory; its bytes travel, its type and shape belong into the header."""

MAGIC = b"EVNR"
VERSION = 1
DATA, CLOSE = 0, 1
"""Flags: a header of the caller's types, or the reason why the sender closes the connection, as a string."""

PREFIX = struct.Struct("<4sBBHIQ")
PREFIX_BYTES = PREFIX.size
LENGTH_BYTES = 8
CHECKSUM = struct.Struct("<I")
CHECKSUM_BYTES = CHECKSUM.size
_LONGEST_REASON = 1000
_ENCODER = msgspec.msgpack.Encoder()


class Frame(msgspec.Struct, Generic[H], frozen=True):
    """A message that has arrived whole.

    Attributes:
        header: as the sender gave it.
        buffers: the memory into which its payload was received; empty if it was dropped.
    """

    header: H
    buffers: tuple[memoryview, ...]


class Close(msgspec.Struct, frozen=True):
    """The peer closes the connection, for `reason`."""

    reason: str

    @property
    def words(self) -> str:
        """The reason in a clause."""
        return f"it said: {self.reason}" if self.reason else "it said goodbye"


@lru_cache(maxsize=256)
def front(num_buffers: int) -> struct.Struct:
    """Layout of a frame's prefix and the lengths of its buffers."""
    return struct.Struct(f"{PREFIX.format}{num_buffers}Q")


def encode_head(sequence: int, header: bytes, lengths: Sequence[int] = (), flags: int = DATA) -> bytes:
    """The head of a frame whose payload has buffers of `lengths` bytes."""
    count = len(lengths)
    head = front(count).pack(MAGIC, VERSION, flags, count, len(header), sequence, *lengths) + header
    return head + CHECKSUM.pack(zlib.crc32(head))


def encode_frame(sequence: int, header: msgspec.Struct, buffers: Sequence[Buffer], limits: Limits) -> list[memoryview]:
    """Frame number `sequence` of a connection: its head and `buffers`, to whose memory it refers.

    Raises:
        InvalidValue: it exceeds a limit, which the receiver would refuse, or a buffer is not contiguous.
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
    """The last frame of a connection, which says why it is closed."""
    return [memoryview(encode_head(sequence, _ENCODER.encode(reason[:_LONGEST_REASON]), flags=CLOSE))]


def drop_sent(views: list[memoryview], count: int) -> None:
    """Let go of the first `count` bytes of a frame; empty views in front go with them."""
    for whole, view in enumerate(views):
        if count < len(view):
            views[0 : whole + 1] = [view[count:]]
            return
        count -= len(view)
    views.clear()


def as_bytes(buffer: Buffer) -> memoryview:
    """The memory of `buffer` as a flat view of bytes, without copying it.

    Raises:
        InvalidValue: its memory is not contiguous.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise InvalidValue("buffer", view.shape, "contiguous in memory")
    return view.cast("B") if view.nbytes else memoryview(b"")


def allocate(_: object, lengths: Sequence[int]) -> list[memoryview]:
    """New memory for every buffer: where payload goes if the receiver does not say otherwise."""
    return [np.empty(length, np.uint8).data for length in lengths]  # not filled with zeros, unlike a bytearray
