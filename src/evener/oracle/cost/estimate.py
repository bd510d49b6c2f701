"""An estimate: what one way of dividing the work over some devices is predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.plan import Strategy


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """One way to do a step, with its price.

    Attributes:
        strategy: how the work is divided.
        devices: in the order of ranks, by their index in the profile.
        replicas: of every rank: the number of the whole model that it is a part of.
        samples: of every rank in a full micro-batch: those of its replica.
        shares: of every rank: the fraction of its replica's model, rows or layers that it does.
        accumulate: micro-batches of a step, one after the other (in a pipeline: behind each other).
        local_steps: of each replica between two exchanges; 1 if they agree after every step.
        stages: of a pipeline: number of the first layer of every stage.
        compute_seconds: of the rank that computes longest, its update included.
        communication_seconds: in which ranks exchange and cannot compute meanwhile.
        waiting_seconds: of the busiest rank for others: what is left of the step.
        sent_bytes: of the rank that sends most.
        memory_bytes: of every rank, at its peak.
        bottleneck: what takes longest, in words.
        rejected: why it cannot or should not run, in words; empty if it can.
    """

    strategy: Strategy
    devices: tuple[int, ...]
    replicas: tuple[int, ...]
    samples: tuple[int, ...]
    shares: tuple[float, ...]
    accumulate: int = 1
    local_steps: int = 1
    stages: tuple[int, ...] = ()
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float = 0.0
    sent_bytes: int = 0
    memory_bytes: tuple[int, ...] = field(default=(), repr=False)
    bottleneck: str = ""
    rejected: str = ""

    @property
    def step_seconds(self) -> float:
        """Of one step of the whole batch."""
        return self.compute_seconds + self.communication_seconds + self.waiting_seconds

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(self.memory_bytes, default=0)


def worst_of(parts: Sequence[tuple[float, str]]) -> str:
    """The words of the part that takes longest."""
    return max(parts, key=lambda part: part[0])[1]
