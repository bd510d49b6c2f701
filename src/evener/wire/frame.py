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

from evener.errors import require

H = TypeVar("H", bound=msgspec.Struct)
Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory; its bytes travel, its type and shape belong into the header."""

MAGIC = b"EVNR"
VERSION = 1
MESSAGE, GOODBYE = 0, 1
"""Flags: a header of the caller's types, or the reason why the sender closes the connection, as a string."""

PREFIX = struct.Struct("<4sBBHIQ")
PREFIX_BYTES = PREFIX.size
LENGTH_BYTES = 8
CHECKSUM = struct.Struct("<I")
CHECKSUM_BYTES = CHECKSUM.size


class Frame(msgspec.Struct, Generic[H], frozen=True):
    """A message that has arrived whole.

    Attributes:
        header: as the sender gave it.
        buffers: the memory into which its payload was received; empty if it was dropped.
        payload_bytes: of all buffers, dropped ones too.
        frame_bytes: of head and payload.
    """

    header: H
    buffers: tuple[memoryview, ...]
    payload_bytes: int
    frame_bytes: int


class Goodbye(msgspec.Struct, frozen=True):
    """The peer closes the connection, for `reason`."""

    reason: str


@lru_cache(maxsize=256)
def front(num_buffers: int) -> struct.Struct:
    """Layout of a frame's prefix and the lengths of its buffers."""
    return struct.Struct(f"{PREFIX.format}{num_buffers}Q")


def encode_head(sequence: int, header: bytes, lengths: Sequence[int] = (), flags: int = MESSAGE) -> bytes:
    """The head of a frame whose payload has buffers of `lengths` bytes."""
    count = len(lengths)
    head = front(count).pack(MAGIC, VERSION, flags, count, len(header), sequence, *lengths) + header
    return head + CHECKSUM.pack(zlib.crc32(head))


def as_bytes(buffer: Buffer) -> memoryview:
    """The memory of `buffer` as a flat view of bytes, without copying it.

    Raises:
        InvalidValue: its memory is not contiguous.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    require(view.c_contiguous, "buffer", view.shape, "contiguous in memory")
    return view.cast("B") if view.nbytes else memoryview(b"")


def allocate(_: object, lengths: Sequence[int]) -> list[memoryview]:
    """New memory for every buffer: where payload goes if the receiver does not say otherwise."""
    return [np.empty(length, np.uint8).data for length in lengths]  # not filled with zeros, unlike a bytearray
