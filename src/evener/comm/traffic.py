"""What a rank has handed to collectives: bytes and seconds by kind."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What this rank handed to collectives, by kind, in bytes that cross its link in a ring algorithm.

    Attributes:
        sent: bytes.
        received: bytes.
        seconds: that this rank waited for them to end; on a GPU, until they were queued.
    """

    sent: dict[str, float] = field(default_factory=dict)
    received: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, kind: str, sent: float, received: float) -> None:
        """Add one call of `kind`."""
        self.sent[kind] = self.sent.get(kind, 0) + sent
        self.received[kind] = self.received.get(kind, 0) + received

    @property
    def sent_bytes(self) -> int:
        """Over all kinds."""
        return round(sum(self.sent.values()))

    @property
    def received_bytes(self) -> int:
        """Over all kinds."""
        return round(sum(self.received.values()))
