"""Limits of peers. This module does not import NumPy, because the command line imports it and must start fast."""

from __future__ import annotations

from math import ceil, isfinite

import msgspec

from evener.records.errors import require


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what a peer may use before it is refused.

    Attributes:
        header_bytes: Size of an encoded header.
        buffers: Number of buffers in one frame.
        frame_bytes: Size of all buffers of one frame together.
        connections: Authenticated connections of a server.
        pending: Connections that have not proved the secret; beyond this number, each new one replaces another.
        handshake_seconds: Time within which a pending peer has to prove the secret.
        patience: Seconds without a byte of progress after which a started frame is abandoned.
        queued_frames: Frames that may wait for one peer of a server.
        queued_bytes: Bytes of these; a frame counts at most a megabyte, because large frames are weights that peers
            share.
        queued_large_buffers: Buffers of more than a megabyte that may wait for one peer; one frame may have more.
        queued_bytes_in_all: Bytes that may wait for all peers together, in addition to a megabyte for each. Large
            buffers are limited by what memory the machine has left instead.
    """

    header_bytes: int = 64 * 1024
    buffers: int = 4096
    frame_bytes: int = 16 * 2**30
    connections: int = 1024
    pending: int = 256
    handshake_seconds: float = 5.0
    patience: float = 15.0
    queued_frames: int = 1024
    queued_bytes: int = 16 * 2**20
    queued_large_buffers: int = 8
    queued_bytes_in_all: int = 256 * 2**20

    def __post_init__(self) -> None:
        queued = (field for field in self.__struct_fields__ if field.startswith("queued_"))
        for field in ("header_bytes", "connections", "pending", *queued):
            value = getattr(self, field)
            require(value >= 1, field, value, "at least 1")
        require(0 <= self.buffers <= 65535, "buffers", self.buffers, "between 0 and 65535")
        require(0 <= self.frame_bytes < 2**63, "frame_bytes", self.frame_bytes, "between 0 and 2**63 - 1")
        for field in ("handshake_seconds", "patience"):
            value = getattr(self, field)
            require(isfinite(value) and value > 0, field, value, "positive and finite")

    def connections_of(self, role: str) -> int:
        """Return the number of connections at which no more tokens of `role` are accepted.

        An eighth is reserved for submitters and admins, and half of that for admins alone.
        """
        reserved = ceil(self.connections / 16)
        return max(1, self.connections - {"node": 2 * reserved, "submitter": reserved}.get(role, 0))
