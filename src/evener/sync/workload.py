"""What a run has to get done, whoever does it."""

from __future__ import annotations

from evener.errors import require
from evener.schema import Part


class Workload(Part, frozen=True, kw_only=True):
    """The data of a run, and when it ends: by epochs, by updates, or by whichever comes first.

    Attributes:
        num_samples: in the data, which all workers can read.
        num_epochs: passes over the data; None: as many as the updates take.
        num_updates: of the common weights; None: as many as the epochs take.
        seed: of the order of the samples.
    """

    num_samples: int
    num_epochs: int | None = None
    num_updates: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ends = (self.num_epochs, self.num_updates)
        require(any(ends), "num_epochs", self.num_epochs, "positive, or else num_updates given")
        require(self.num_samples > 0, "num_samples", self.num_samples, "positive")
        for field, value in (("num_epochs", ends[0]), ("num_updates", ends[1])):
            require(value is None or value > 0, field, value, "positive, or None")
