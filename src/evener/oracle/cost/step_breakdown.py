"""What takes the time of a predicted step, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Seconds of a step by what takes them; together they are the step.

    Attributes:
        computing: forward and backward of the rank that computes longest: of divided layers, its part of the time that
            the whole layers take there.
        thin_layers: what that rank's parts of divided layers take beyond this.
        copies: splitting and joining tensors for exchanges.
        update: the optimizer's step.
        layers: exchanges between layers, inside of a replica.
        stages: activations and their gradients, from stage to stage.
        gradients: the all-reduce of gradients, as far as the backward pass does not hide it.
        statistics: exchanges of BatchNorm's statistics.
        parameters: averaging of parameters, or the way to a server and back.
        slower_ranks: waiting for the slowest rank of every layer.
        idle: waiting while the first micro-batches arrive in a pipeline and the last ones leave.
        server_link: waiting at the server's link, which is busy with the others.
    """

    computing: float
    thin_layers: float = 0.0
    copies: float = 0.0
    update: float = 0.0
    layers: float = 0.0
    stages: float = 0.0
    gradients: float = 0.0
    statistics: float = 0.0
    parameters: float = 0.0
    slower_ranks: float = 0.0
    idle: float = 0.0
    server_link: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """Seconds in which the busiest rank computes."""
        return self.computing + self.thin_layers + self.copies + self.update

    @property
    def communication_seconds(self) -> float:
        """Seconds in which ranks exchange and cannot compute."""
        return self.layers + self.stages + self.gradients + self.statistics + self.parameters

    @property
    def waiting_seconds(self) -> float:
        """The remaining seconds of a step, in which the busiest rank waits for others."""
        return self.slower_ranks + self.idle + self.server_link

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of all kinds, in the order of the attributes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def longest(self, phrases: Mapping[str, str]) -> str:
        """Return the phrase of what takes longest.

        Args:
            phrases: phrases by the name of an attribute or property.
        """
        return phrases[max(phrases, key=lambda name: getattr(self, name))]
