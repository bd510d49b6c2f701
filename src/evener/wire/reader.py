"""The reader of frames: an incremental state machine without sockets, so that it can be fuzzed and used anywhere.

    frame = reader.feed(0)
    while frame is None:                            # None: more bytes are needed
        count = receive_into(reader.space)          # payload is received in its final place
        frame = reader.feed(count)

Heads are read ahead into a small buffer of the reader; payload goes directly into the memory of `place`. Only payload
bytes that arrive together with a head are copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from evener.records.decoding import msgpack_decoder
from evener.records.errors import InvalidValue
from evener.records.schema import shown
from evener.wire.errors import BadFrame
from evener.wire.frame import (
    CHECKSUM,
    CHECKSUM_BYTES,
    CLOSE,
    DATA,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
    VERSION,
    Buffer,
    Close,
    Frame,
    H,
    allocate,
    as_bytes,
    front,
)
from evener.wire.limits import Limits

Place: TypeAlias = Callable[[H, tuple[int, ...]], Sequence[Buffer] | None]
"""Returns the memory for the buffers of a frame, given header and lengths; None drops them, BadFrame refuses."""
OnPart: TypeAlias = Callable[[H, int, bool], bool]
"""Called every 4 KB of payload and at its end, with header, received bytes, and whether these are all.

Its last result says whether it has handled the frame.
"""

READ_AHEAD = 4096
_DROP_BYTES = 64 * 1024
_BEGINNING = f"{MAGIC!r}, version {VERSION} and flags {DATA} or {CLOSE}"
_PREFIX_FIELDS = 6
_decode_reason = msgpack_decoder(str).decode
_NOTHING: Iterator[memoryview] = iter(())
T = TypeVar("T")


class FrameReader(Generic[H]):
    """Reads the frames of one direction of one connection.

    Args:
        headers: Type of the headers, usually a union of tagged structs.
        limits: Limits of a frame.
        place: Returns the memory of payload; may be replaced between two frames.
        on_part: Called with progress; may be replaced between two frames.

    Attributes:
        space: Memory for the next bytes; never empty.
        midway: Whether bytes have come that were not returned as a frame.
        is_taken: Whether `on_part` has handled the frame that was returned last.
        refused: The message of the error that `feed` raised, after which nothing can follow. Only the message is kept,
            because an exception would keep this reader and its memory alive.
    """

    def __init__(
        self, headers: Any, limits: Limits, place: Place[H] = allocate, on_part: OnPart[H] | None = None
    ) -> None:
        self.place, self.on_part = place, on_part
        self._decode = msgpack_decoder(headers).decode
        self._limits = limits
        self._near = self.space = memoryview(bytearray(READ_AHEAD))
        self.midway = self.is_taken = False
        self._start = self._end = 0  # of the bytes that were read ahead and not parsed
        self._needed = PREFIX_BYTES  # bytes from start on before the head can be parsed again
        self._sequence = 0
        self._header: H | None = None  # of the frame whose payload is arriving, like the fields below
        self._views: tuple[memoryview, ...] = ()
        self._rest = _NOTHING
        self._missing = self._received = self._reported = 0
        self.refused: str | None = None

    def feed(self, count: int) -> Frame[H] | Close | None:
        """Process the first `count` bytes of `space`; return the next frame if it is complete.

        Raises:
            BadFrame: The bytes are not the expected frame, or exceed a limit; every later call raises it again.
        """
        if self.refused is not None:
            raise BadFrame(self.refused)
        try:
            if self._header is None:
                self._end += count
                closed = self._begin() if self._end - self._start >= self._needed else None
                if self._header is None:
                    self._look_ahead()
                    self.midway = self._start != self._end
                    return closed
            else:
                self._advance(count)
            return self._progress(self._header)
        except Exception as error:
            self.refused = str(error)
            raise

    def _progress(self, header: H) -> Frame[H] | None:
        """Report the progress of a payload; return the frame if it is complete."""
        received, missing = self._received, self._missing
        if received > self._reported and self.on_part is not None:
            if (
                missing and received - self._reported < READ_AHEAD
            ):  # the bytes that came with the head are not worth a call
                return None
            self._reported = received
            self.is_taken = self.on_part(header, received, not missing)
        if missing:
            return None
        frame = Frame(header, self._views)
        self._header, self._views, self._rest = None, (), _NOTHING  # their memory may be used again now
        self._look_ahead()
        self.midway = self._start != self._end
        return frame

    def _begin(self) -> Close | None:
        """Parse the prefix, then the whole head when it is complete, then prepare for its payload."""
        near, start, limits = self._near, self._start, self._limits
        magic, version, flags, num_buffers, header_bytes, sequence = PREFIX.unpack_from(near, start)
        if magic != MAGIC or version != VERSION or flags > CLOSE:
            raise BadFrame(f"a frame begins with {_BEGINNING}, got {(magic, version, flags)}")
        if header_bytes > limits.header_bytes:
            raise BadFrame(f"a header must be at most {limits.header_bytes} bytes, got {header_bytes}")
        if num_buffers > limits.buffers:
            raise BadFrame(f"a frame must have at most {limits.buffers} buffers, got {num_buffers}")
        layout = front(num_buffers)
        checked = layout.size + header_bytes
        self._needed = checked + CHECKSUM_BYTES
        if self._end - start < self._needed:
            return None
        head = near[start : start + checked]
        if zlib.crc32(head) != CHECKSUM.unpack_from(near, start + checked)[0]:
            raise BadFrame("the head of a frame is damaged: its checksum is wrong")
        if sequence != self._sequence:
            raise BadFrame(f"expected frame {self._sequence}, got {sequence}: a frame was lost, repeated or reordered")
        self._start, self._needed, self._sequence = start + self._needed, PREFIX_BYTES, sequence + 1
        if flags == CLOSE:
            return Close(shown(_decoded(_decode_reason, head[layout.size :])))
        lengths = layout.unpack_from(near, start)[_PREFIX_FIELDS:]
        if (total := sum(lengths)) > limits.frame_bytes:
            raise BadFrame(f"a frame must have at most {limits.frame_bytes} bytes of payload, got {total}")
        self._expect(_decoded(self._decode, head[layout.size :]), lengths, total)
        return None

    def _look_ahead(self) -> None:
        """Receive the next bytes after those that were read ahead, with room for the whole head."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._near) > READ_AHEAD and self._needed == PREFIX_BYTES:  # a large head was read
                self._near = memoryview(bytearray(READ_AHEAD))
            self.space = self._near
            return
        if self._start + self._needed > len(self._near):
            rest = bytes(self._near[self._start : self._end])
            if self._needed > len(self._near):
                self._near = memoryview(bytearray(self._needed))
            self._near[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self.space = self._near[self._end :]

    def _expect(self, header: H, lengths: tuple[int, ...], total: int) -> None:
        """Receive the payload into the memory of `place`; copy the bytes that came with the head."""
        places = self.place(header, lengths)
        self.midway = True
        self._header, self._missing, self._received, self._reported = header, total, 0, 0
        self.is_taken = False
        self._views = () if places is None else _checked(places, lengths)
        if not total:
            return
        self._rest = self._dropping() if places is None else iter(self._views)
        self.space = next(self._rest)
        self._advance(0)
        while self._missing and (here := self._end - self._start):
            count = min(len(self.space), here)
            self.space[:count] = self._near[self._start : self._start + count]
            self._start += count
            self._advance(count)

    def _advance(self, count: int) -> None:
        """Count `count` bytes of payload as received, and receive the next ones after them."""
        self._received += count
        self._missing -= count
        if self._missing:
            self.space = self.space[count:]
            while not self.space:
                self.space = next(self._rest)

    def _dropping(self) -> Iterator[memoryview]:
        scratch = memoryview(bytearray(min(self._missing, _DROP_BYTES)))
        while True:
            yield scratch[: self._missing]


def _decoded(decode: Callable[[memoryview], T], header: memoryview) -> T:
    try:
        return decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"unknown or invalid header: {error}") from error


def _checked(places: Sequence[Buffer], lengths: tuple[int, ...]) -> tuple[memoryview, ...]:
    views = tuple(map(as_bytes, places))
    sizes = tuple(map(len, views))
    if sizes != lengths:
        raise InvalidValue("bytes of the places", sizes, f"those of the buffers, {lengths}")
    return views
