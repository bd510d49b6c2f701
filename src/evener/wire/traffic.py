"""What went through a connection: frames, bytes and seconds by kind of message, so that overhead can be shown."""

from __future__ import annotations

import msgspec


class Tally(msgspec.Struct):
    """Frames of one kind in one direction.

    Attributes:
        frames: how many.
        payload_bytes: of their buffers.
        frame_bytes: of their heads and buffers.
        seconds: from the first to the last byte of each frame, added up.
    """

    frames: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    seconds: float = 0.0

    def add(self, frames: int, payload_bytes: int, frame_bytes: int, seconds: float) -> None:
        """Count more frames of this kind."""
        self.frames += frames
        self.payload_bytes += payload_bytes
        self.frame_bytes += frame_bytes
        self.seconds += seconds


class Traffic(msgspec.Struct):
    """What one connection, or several together, carried.

    Attributes:
        sent: by name of the header's type.
        received: by name of the header's type.
        wire_bytes_sent: handed to the kernel, with greeting and TLS.
        wire_bytes_received: taken from the kernel, with greeting and TLS.
    """

    sent: dict[str, Tally] = msgspec.field(default_factory=dict)
    received: dict[str, Tally] = msgspec.field(default_factory=dict)
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0

    def add(self, other: Traffic) -> None:
        """Count what `other` carried as well."""
        for own, more in ((self.sent, other.sent), (self.received, other.received)):
            for kind, tally in more.items():
                own.setdefault(kind, Tally()).add(tally.frames, tally.payload_bytes, tally.frame_bytes, tally.seconds)
        self.wire_bytes_sent += other.wire_bytes_sent
        self.wire_bytes_received += other.wire_bytes_received


def count(tallies: dict[str, Tally], header: object, payload_bytes: int, frame_bytes: int, seconds: float) -> None:
    """Count one frame with `header`."""
    kind = type(header).__name__
    if (tally := tallies.get(kind)) is None:
        tally = tallies[kind] = Tally()
    tally.frames += 1
    tally.payload_bytes += payload_bytes
    tally.frame_bytes += frame_bytes
    tally.seconds += seconds
