"""A frame on its way out: views of the caller's memory, shortened as the kernel takes bytes; nothing is joined."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.errors import InvalidValue
from evener.wire.frame import GOODBYE, Buffer, Goodbye, as_bytes, encode_head
from evener.wire.limits import Limits

_ENCODER = msgspec.msgpack.Encoder()
_LONGEST_REASON = 1000


class Outgoing:
    """A frame that waits for the kernel to take it.

    Attributes:
        header: as the caller gave it.
        started: when the first byte was offered to the kernel, or 0.
        views: what is still to be sent.
        payload_bytes: of all buffers.
        frame_bytes: of head and payload.
    """

    __slots__ = ("_left", "frame_bytes", "header", "payload_bytes", "started", "views")

    def __init__(self, header: msgspec.Struct, views: list[memoryview], payload_bytes: int) -> None:
        self.header, self.views, self.payload_bytes = header, views, payload_bytes
        self.frame_bytes = self._left = len(views[0]) + payload_bytes
        self.started = 0.0

    def advance(self, count: int) -> None:
        """Let go of the first `count` bytes; empty views in front go with them."""
        views = self.views
        self._left -= count
        if not self._left:
            views.clear()
            return
        for whole, view in enumerate(views):
            if count < len(view):
                views[0 : whole + 1] = [view[count:]]
                return
            count -= len(view)


def message(sequence: int, header: msgspec.Struct, buffers: Sequence[Buffer], limits: Limits) -> Outgoing:
    """Frame number `sequence` of a connection with `header` and `buffers`, whose memory it refers to.

    Raises:
        InvalidValue: it exceeds a limit, which the receiver would refuse, or a buffer is not contiguous.
    """
    encoded = _ENCODER.encode(header)
    views = [as_bytes(buffer) for buffer in buffers]
    lengths = [len(view) for view in views]
    total = sum(lengths)
    if len(encoded) > limits.header_bytes:
        raise InvalidValue("bytes of a header", len(encoded), f"at most {limits.header_bytes}")
    if len(views) > limits.buffers:
        raise InvalidValue("number of buffers", len(views), f"at most {limits.buffers}")
    if total > limits.frame_bytes:
        raise InvalidValue("bytes of a frame", total, f"at most {limits.frame_bytes}")
    return Outgoing(header, [memoryview(encode_head(sequence, encoded, lengths)), *views], total)


def goodbye(sequence: int, reason: str) -> Outgoing:
    """The last frame of a connection, which says why it is closed."""
    encoded = _ENCODER.encode(reason[:_LONGEST_REASON])
    return Outgoing(Goodbye(reason), [memoryview(encode_head(sequence, encoded, flags=GOODBYE))], 0)
