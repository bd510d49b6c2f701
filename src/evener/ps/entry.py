"""What a few neighbouring updates did, and what every node did for them: plain numbers that can be added up."""

from __future__ import annotations

from dataclasses import dataclass, field

from evener.record import NodeStep, Step


@dataclass
class Work:
    """What one node did in an entry.

    Attributes:
        samples: that it computed.
        seconds: that it computed.
        sent: bytes of its contributions.
        received: bytes of weights that it was sent.
        saved: bytes that compression saved, of both.
    """

    samples: int = 0
    seconds: float = 0.0
    sent: int = 0
    received: int = 0
    saved: int = 0

    def add(self, other: Work) -> None:
        """Count what `other` did as well."""
        self.samples += other.samples
        self.seconds += other.seconds
        self.sent += other.sent
        self.received += other.received
        self.saved += other.saved


@dataclass
class Entry:
    """Some neighbouring updates, summed."""

    version: int = 0
    epoch: int = 0
    samples: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    updates: int = 0
    contributions: int = 0
    staleness: int = 0
    nodes: dict[str, Work] = field(default_factory=dict)

    def add(self, other: Entry) -> None:
        """Count the later updates in `other` as well."""
        self.version, self.epoch = other.version, other.epoch
        self.samples += other.samples
        self.loss += other.loss
        self.seconds += other.seconds
        self.updates += other.updates
        self.contributions += other.contributions
        self.staleness += other.staleness
        for name, work in other.nodes.items():
            own = self.nodes.get(name)
            if own is None:
                own = self.nodes[name] = Work()
            own.add(work)

    def step(self, names: list[str]) -> Step:
        """The entry as a part of a record, with a column for each of `names`."""
        return Step(
            step=self.version,
            epoch=self.epoch,
            samples=self.samples,
            loss=self.loss / self.samples if self.samples else 0.0,
            seconds=self.seconds,
            nodes=tuple(_node_step(self.nodes.get(name, Work()), self.seconds) for name in names),
            staleness=self.staleness / self.contributions if self.contributions else 0.0,
        )


def _node_step(work: Work, seconds: float) -> NodeStep:
    return NodeStep(
        samples=work.samples,
        io_seconds=0.0,
        compute_seconds=work.seconds,
        wait_seconds=max(0.0, seconds - work.seconds),
        update_seconds=0.0,
        sent_bytes=work.sent,
    )
