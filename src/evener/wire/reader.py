"""Bytes become frames: an incremental state machine that knows no sockets, so that it can be fuzzed and used anywhere.

    frame = reader.feed(0)
    while frame is None:                            # None: more bytes are needed
        count = receive_into(reader.space)          # payload lands where it will stay
        frame = reader.feed(count)

Heads are read ahead into a small buffer of the reader's own, payload goes straight to where `place` says. Only the few
bytes of payload that came along with a head are copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

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
"""Where the buffers of a frame with this header go, given their lengths; None drops them; BadFrame refuses them."""
OnPart: TypeAlias = Callable[[H, int, bool], bool]
"""Gets the header, how many bytes of the payload have arrived, and whether these are all: then, and whenever 4 KB more.

What it answers when all are here says whether the frame has been dealt with by that.
"""

READ_AHEAD = 4096
_DROP_BYTES = 64 * 1024
_BEGINNING = f"{MAGIC!r}, version {VERSION} and flags {DATA} or {CLOSE}"
_PREFIX_FIELDS = 6
_REASON = msgspec.msgpack.Decoder(str)
_NOTHING: Iterator[memoryview] = iter(())
T = TypeVar("T")


class FrameReader(Generic[H]):
    """Reads the frames of one direction of one connection.

    Args:
        headers: type of the headers, usually a union of tagged structs.
        limits: what a frame may hold.
        place: where payload goes; may be replaced between two frames.
        on_part: gets progress; may be replaced between two frames.

    Attributes:
        space: where the next bytes have to be put; never empty.
        midway: whether bytes have come that were not handed out as a frame.
        is_taken: whether `on_part` has dealt with the frame that was handed out last.
        refused: why nothing can follow any more: what `feed` raised, of the bytes or out of `place` or `on_part`. Words
            alone, since a kept exception keeps the frames it passed through, and with them this reader and its memory.
    """

    def __init__(
        self, headers: Any, limits: Limits, place: Place[H] = allocate, on_part: OnPart[H] | None = None
    ) -> None:
        self.place, self.on_part = place, on_part
        self._decoder = msgspec.msgpack.Decoder(headers)
        self._limits = limits
        self._near = self.space = memoryview(bytearray(READ_AHEAD))
        self.midway = self.is_taken = False
        self._start = self._end = 0  # of what was read ahead and not looked at
        self._needed = PREFIX_BYTES  # bytes from start on before the head can be looked at again
        self._sequence = 0
        self._header: H | None = None  # of the frame whose payload is on its way, as what follows
        self._views: tuple[memoryview, ...] = ()
        self._rest = _NOTHING
        self._missing = self._received = self._reported = 0
        self.refused: str | None = None

    def feed(self, count: int) -> Frame[H] | Close | None:
        """The next frame, if it is whole now that the first `count` bytes of `space` have arrived.

        Raises:
            BadFrame: the bytes are not the frame that was due, or exceed a limit; from then on always.
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
        """Report what is here of a payload; the frame, if that is all."""
        received, missing = self._received, self._missing
        if received > self._reported and self.on_part is not None:
            if missing and received - self._reported < READ_AHEAD:  # what came along with the head is not worth a call
                return None
            self._reported = received
            self.is_taken = self.on_part(header, received, not missing)
        if missing:
            return None
        frame = Frame(header, self._views)
        self._header, self._views, self._rest = None, (), _NOTHING  # whose memory may be used again now
        self._look_ahead()
        self.midway = self._start != self._end
        return frame

    def _begin(self) -> Close | None:
        """Look at the prefix, then at the whole head once it is there, then have its payload come."""
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
            raise BadFrame("the head of a frame was damaged on its way: its checksum is wrong")
        if sequence != self._sequence:
            raise BadFrame(f"frame {self._sequence} was due and frame {sequence} came: one was lost, repeated or moved")
        self._start, self._needed, self._sequence = start + self._needed, PREFIX_BYTES, sequence + 1
        if flags == CLOSE:
            return Close(shown(_decoded(_REASON, head[layout.size :])))
        lengths = layout.unpack_from(near, start)[_PREFIX_FIELDS:]
        if (total := sum(lengths)) > limits.frame_bytes:
            raise BadFrame(f"a frame must have at most {limits.frame_bytes} bytes of payload, got {total}")
        self._expect(_decoded(self._decoder, head[layout.size :]), lengths, total)
        return None

    def _look_ahead(self) -> None:
        """Have the next bytes come behind those that were read ahead, with room for the whole head."""
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
        """Have the payload come into the places that the receiver gives; take what came along with the head."""
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
        """Count so many bytes of payload as received, and have the next ones come behind them."""
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


def _decoded(decoder: msgspec.msgpack.Decoder[T], header: memoryview) -> T:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a header must be one of those known here: {error}") from error


def _checked(places: Sequence[Buffer], lengths: tuple[int, ...]) -> tuple[memoryview, ...]:
    views = tuple(map(as_bytes, places))
    sizes = tuple(map(len, views))
    if sizes != lengths:
        raise InvalidValue("bytes of the places", sizes, f"those of the buffers, {lengths}")
    return views
