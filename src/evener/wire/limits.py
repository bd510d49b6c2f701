"""How much a peer may ask for, in bytes, in numbers and in seconds, before it is refused."""

from __future__ import annotations

from math import isfinite

import msgspec

from evener.errors import require


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one side of a connection.

    Attributes:
        header_bytes: of an encoded header.
        buffers: in one frame.
        frame_bytes: of all buffers of one frame together.
        connections: that have proved the secret, at a hub.
        strangers: connections that have not proved it yet; beyond this number, one goes for each that comes.
        greeting_seconds: within which a stranger has to prove the secret.
        patience: seconds without a byte of progress after which a frame that has begun is given up.
        queued_frames: that may wait for one peer at a hub.
    """

    header_bytes: int = 64 * 1024
    buffers: int = 4096
    frame_bytes: int = 16 * 2**30
    connections: int = 1024
    strangers: int = 256
    greeting_seconds: float = 5.0
    patience: float = 15.0
    queued_frames: int = 1024

    def __post_init__(self) -> None:
        for field in ("header_bytes", "connections", "strangers", "queued_frames"):
            value = getattr(self, field)
            require(value >= 1, field, value, "at least 1")
        require(0 <= self.buffers <= 65535, "buffers", self.buffers, "between 0 and 65535")
        require(0 <= self.frame_bytes < 2**63, "frame_bytes", self.frame_bytes, "between 0 and 2**63 - 1")
        for field in ("greeting_seconds", "patience"):
            value = getattr(self, field)
            require(isfinite(value) and value > 0, field, value, "positive and finite")
