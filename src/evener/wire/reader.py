"""Bytes become frames: an incremental state machine that knows no sockets, so that it can be fuzzed and used anywhere.

    while (frame := reader.frame()) is None:        # None: more bytes are needed
        count = receive_into(reader.space())        # payload lands where it will stay
        reader.filled(count)

Heads are read ahead into a small buffer of the reader's own, payload goes straight to where `place` says. Only the few
bytes of payload that came along with a head are copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from evener.errors import InvalidValue
from evener.wire.frame import (
    CHECKSUM,
    CHECKSUM_BYTES,
    GOODBYE,
    LENGTH_BYTES,
    MAGIC,
    MESSAGE,
    PREFIX,
    PREFIX_BYTES,
    VERSION,
    Buffer,
    Frame,
    Goodbye,
    H,
    allocate,
    as_bytes,
    front,
)
from evener.wire.limits import Limits
from evener.wire.refusals import BadFrame

Place: TypeAlias = Callable[[H, tuple[int, ...]], Sequence[Buffer] | None]
"""Where the buffers of a frame with this header go, given their lengths; None drops them; BadFrame refuses them."""
OnPart: TypeAlias = Callable[[H, int], None]
"""Told the header and how many bytes of the payload have arrived: when all are here, and before, whenever 4 KB more."""

READ_AHEAD = 4096
_DROP_BYTES = 64 * 1024
_BEGINNING = f"{MAGIC!r}, version {VERSION} and flags {MESSAGE} or {GOODBYE}"
_PREFIX_FIELDS = 6
_NOTHING = memoryview(b"")
_GOODBYE = msgspec.msgpack.Decoder(str)
T = TypeVar("T")


class FrameReader(Generic[H]):
    """Reads the frames of one direction of one connection.

    Args:
        headers: type of the headers, usually a union of tagged structs.
        limits: what a frame may hold.
        place: where payload goes; may be replaced between two frames.
        on_part: told about progress; may be replaced between two frames.
    """

    def __init__(
        self, headers: Any, limits: Limits, place: Place[H] = allocate, on_part: OnPart[H] | None = None
    ) -> None:
        self.place, self.on_part = place, on_part
        self._decoder = msgspec.msgpack.Decoder(headers)
        self._limits = limits
        self._near = memoryview(bytearray(READ_AHEAD))
        self._start = self._end = 0  # of what was read ahead and not looked at
        self._needed = PREFIX_BYTES  # bytes from start on before the head can be looked at again
        self._sequence = 0
        self._arrival: _Arrival[H] | None = None
        self._refusal: Exception | None = None

    @property
    def midway(self) -> bool:
        """Whether bytes have come that were not handed out as a frame."""
        return self._arrival is not None or self._start != self._end

    def space(self) -> memoryview:
        """Where the next bytes have to be put; never empty."""
        if self._arrival is not None:
            return self._arrival.space
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + self._needed > len(self._near):
            self._make_room()
        return self._near[self._end :]

    def filled(self, count: int) -> None:
        """Say that the first `count` bytes of `space()` have arrived."""
        if self._arrival is not None:
            self._arrival.filled(count)
        else:
            self._end += count

    def frame(self) -> Frame[H] | Goodbye | None:
        """The next frame, if it is whole.

        Raises:
            BadFrame: the bytes are not the frame that was due, or exceed a limit; from then on always.
        """
        if self._refusal is not None:
            raise self._refusal
        try:
            if self._arrival is None:
                if self._end - self._start < self._needed:
                    return None
                begun = self._begin()
                if not isinstance(begun, _Arrival):
                    return begun
                self._arrival = begun
                if self._start != self._end:
                    self._start += begun.take(self._near[self._start : self._end])
            arrival = self._arrival
            if self.on_part is not None and (num_new := arrival.received - arrival.told):
                if num_new < READ_AHEAD and arrival.missing:  # what came along with the head is not worth a call
                    return None
                arrival.told = arrival.received
                self.on_part(arrival.header, arrival.received)
        except Exception as error:
            self._refusal = error
            raise
        if arrival.missing:
            return None
        self._arrival = None
        return Frame(arrival.header, arrival.views, arrival.received, arrival.head_bytes + arrival.received)

    def _begin(self) -> _Arrival[H] | Goodbye | None:
        """Look at the prefix, then at the whole head once it is there."""
        near, start, limits = self._near, self._start, self._limits
        magic, version, flags, num_buffers, header_bytes, sequence = PREFIX.unpack_from(near, start)
        size = PREFIX_BYTES + LENGTH_BYTES * num_buffers + header_bytes + CHECKSUM_BYTES
        if self._needed < size:
            if (magic, version) != (MAGIC, VERSION) or flags > GOODBYE:
                raise BadFrame(f"a frame begins with {_BEGINNING}, got {(magic, version, flags)}")
            if header_bytes > limits.header_bytes:
                raise BadFrame(f"a header must be at most {limits.header_bytes} bytes, got {header_bytes}")
            if num_buffers > limits.buffers:
                raise BadFrame(f"a frame must have at most {limits.buffers} buffers, got {num_buffers}")
            self._needed = size
            if self._end - start < size:
                return None
        end = start + size - CHECKSUM_BYTES
        head = near[start:end]
        if zlib.crc32(head) != CHECKSUM.unpack_from(near, end)[0]:
            raise BadFrame("the head of a frame was damaged on its way: its checksum is wrong")
        if sequence != self._sequence:
            raise BadFrame(f"frame {self._sequence} was due and frame {sequence} came: one was lost, repeated or moved")
        layout = front(num_buffers)
        lengths = layout.unpack_from(head)[_PREFIX_FIELDS:]
        header = head[layout.size :]
        self._start, self._needed, self._sequence = start + size, PREFIX_BYTES, sequence + 1
        if flags == GOODBYE:
            return Goodbye(_decoded(_GOODBYE, header))
        if sum(lengths) > limits.frame_bytes:
            raise BadFrame(f"a frame must have at most {limits.frame_bytes} bytes of payload, got {sum(lengths)}")
        message: H = _decoded(self._decoder, header)
        return _Arrival(message, size, lengths, self.place(message, lengths))

    def _make_room(self) -> None:
        """Move what was read ahead to the front, into a larger buffer if the head needs one."""
        rest = bytes(self._near[self._start : self._end])
        if self._needed > len(self._near):
            self._near = memoryview(bytearray(self._needed))
        self._near[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class _Arrival(Generic[H]):
    """A frame whose payload is on its way into the places that the receiver has given."""

    __slots__ = ("_rest", "head_bytes", "header", "missing", "received", "space", "told", "views")

    def __init__(self, header: H, head_bytes: int, lengths: tuple[int, ...], places: Sequence[Buffer] | None) -> None:
        self.header, self.head_bytes = header, head_bytes
        self.views = () if places is None else _checked(places, lengths)
        self.missing, self.received, self.told = sum(lengths), 0, 0
        self._rest = self._dropping() if places is None else iter(self.views)
        self.space = _NOTHING
        if self.missing:
            self._next_view()

    def filled(self, count: int) -> None:
        """Count bytes that were put into `space`."""
        self.missing -= count
        self.received += count
        self.space = self.space[count:]
        if self.missing and not self.space:
            self._next_view()

    def take(self, near: memoryview) -> int:
        """Copy payload that came along with the head from `near`; how many bytes of it are payload."""
        taken = 0
        while self.missing and taken < len(near):
            count = min(len(self.space), len(near) - taken)
            self.space[:count] = near[taken : taken + count]
            self.filled(count)
            taken += count
        return taken

    def _next_view(self) -> None:
        self.space = next(self._rest)
        while not self.space:
            self.space = next(self._rest)

    def _dropping(self) -> Iterator[memoryview]:
        scratch = memoryview(bytearray(min(self.missing, _DROP_BYTES)))
        while True:
            yield scratch[: self.missing]


def _decoded(decoder: msgspec.msgpack.Decoder[T], header: memoryview) -> T:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a header must be one of those known here: {error}") from error


def _checked(places: Sequence[Buffer], lengths: tuple[int, ...]) -> tuple[memoryview, ...]:
    views = tuple([as_bytes(place) for place in places])
    sizes = tuple([len(view) for view in views])
    if sizes != lengths:
        raise InvalidValue("bytes of the places", sizes, f"those of the buffers, {lengths}")
    return views
