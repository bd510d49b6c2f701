"""How much a peer may ask for; without NumPy, as the command line takes its patience from here and must begin soon."""

from __future__ import annotations

from math import ceil, isfinite

import msgspec

from evener.records.errors import require


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a peer may ask for before it is refused.

    Attributes:
        header_bytes: of an encoded header.
        buffers: in one frame.
        frame_bytes: of all buffers of one frame together.
        connections: that have proved the secret, at a server.
        pending: connections that have not proved it yet; beyond this number, one goes for each that comes.
        handshake_seconds: within which a pending peer has to prove the secret.
        patience: seconds without a byte of progress after which a frame that has begun is given up.
        queued_frames: that may wait for one peer at a server.
        queued_bytes: of these; of a frame a megabyte at most is counted, since large ones are weights that peers share.
        queued_bytes_in_all: of all peers together, besides a megabyte of each.
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
    queued_bytes_in_all: int = 256 * 2**20

    def __post_init__(self) -> None:
        for field in ("header_bytes", "connections", "pending", "queued_frames", "queued_bytes", "queued_bytes_in_all"):
            value = getattr(self, field)
            require(value >= 1, field, value, "at least 1")
        require(0 <= self.buffers <= 65535, "buffers", self.buffers, "between 0 and 65535")
        require(0 <= self.frame_bytes < 2**63, "frame_bytes", self.frame_bytes, "between 0 and 2**63 - 1")
        for field in ("handshake_seconds", "patience"):
            value = getattr(self, field)
            require(isfinite(value) and value > 0, field, value, "positive and finite")

    def connections_of(self, role: str) -> int:
        """Connections beyond which no other one with a token of `role` is accepted.

        An eighth is kept for submitters and admins, and half of that for admins alone.
        """
        kept = ceil(self.connections / 16)
        return max(1, self.connections - {"node": 2 * kept, "submitter": kept}.get(role, 0))
