"""A rank's counts of bytes and seconds in collectives, by kind."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """This rank's collectives by kind, in bytes that cross its link in a ring algorithm.

    Attributes:
        sent: bytes.
        received: bytes.
        seconds: of this rank's waits for their end; on a GPU, until they were queued.
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
        """The bytes sent, over all kinds."""
        return round(sum(self.sent.values()))

    @property
    def received_bytes(self) -> int:
        """The bytes received, over all kinds."""
        return round(sum(self.received.values()))
