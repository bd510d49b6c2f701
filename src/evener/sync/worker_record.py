"""All that a server knows of one worker: the one place for its leases, its speed and its counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evener.sync.messages import Lease, WorkerTotals
from evener.sync.speed_estimator import SpeedEstimate

_REMEMBERED = 4
"""Leases after whose answer a repeated contribution is known to be one."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A worker that is, or once was, here.

    Attributes:
        name: of the worker.
        speed: of its work.
        totals: of what it did.
        is_here: whether it is a member of the run now.
        leases: that it has not answered, by number, the oldest first: whoever has one is awaited.
        answered: numbers of the leases that it answered last.
        turns: that it has had, for the bound of staleness.
        is_up_to_date: whether it knows all that it was sent; not so at first.
        knows_the_end: whether it was sent that the run is over.
    """

    name: str
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    is_here: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    turns: int = 0
    is_up_to_date: bool = False
    knows_the_end: bool = False

    def enter(self) -> None:
        """It is here, and knows nothing."""
        self.is_here, self.is_up_to_date, self.knows_the_end = True, False, False
        self.turns = 0
        self.leases.clear()
        self.answered.clear()

    @property
    def oldest_lease(self) -> Lease | None:
        """What it works on; None if it waits."""
        return next(iter(self.leases.values())) if self.leases else None
