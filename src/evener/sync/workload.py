"""What a run has to get done, whoever does it."""

from __future__ import annotations

from evener.errors import require
from evener.schema import Part


class Workload(Part, frozen=True, kw_only=True):
    """The data of a run, and when it ends: by epochs, by updates, or by whichever comes first.

    Attributes:
        num_samples: in the data that all workers can read; None if every worker has data of its own that stays there.
        num_epochs: passes over the data, each worker's own if it stays there; None: as many as the updates take.
        num_updates: of the common weights; None: as many as the epochs take.
        seed: of the order of the samples.
    """

    num_samples: int | None
    num_epochs: int | None = None
    num_updates: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ends = (self.num_epochs, self.num_updates)
        require(any(ends), "num_epochs", self.num_epochs, "positive, or else num_updates given")
        for field, value in (("num_samples", self.num_samples), ("num_epochs", ends[0]), ("num_updates", ends[1])):
            require(value is None or value > 0, field, value, "positive, or None")
