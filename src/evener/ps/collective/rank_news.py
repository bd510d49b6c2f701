"""What the ranks of a run have told of it, and what of that nobody was shown yet."""

from __future__ import annotations

from collections.abc import Sequence

from evener.events import Phase, RunEvent
from evener.plan import Plan
from evener.record import Event, Step, TrainRecord, Validation


class RankNews:
    """Of one run.

    Attributes:
        events: that nobody was shown yet.
        record: what the run has come to; None before.
        plan, phase, step, validation: the last ones.
    """

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.record: TrainRecord | None = None
        self.plan: Plan | None = None
        self.phase: Phase | None = None
        self.step: Step | None = None
        self.validation: Validation | None = None

    def add(self, events: Sequence[RunEvent]) -> None:
        """The ranks have told this."""
        for event in events:
            if isinstance(event, TrainRecord):
                self.record = event
                continue
            if isinstance(event, Plan):
                self.plan = event
            elif isinstance(event, Phase):
                self.phase = event
            elif isinstance(event, Step):
                self.step = event
            elif isinstance(event, Validation):
                self.validation = event
            self.events.append(event)

    def note(self, kind: str, message: str, nodes: tuple[str, ...]) -> None:
        """Something happened to `nodes`."""
        self.events.append(Event(step=self.step.step if self.step else 0, kind=kind, message=message, nodes=nodes))

    @property
    def so_far(self) -> list[RunEvent]:
        """For somebody who begins to watch: how the work is divided, and what the run is about."""
        return [event for event in (self.plan, self.phase) if event is not None]
