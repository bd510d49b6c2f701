"""What a run remembers and has shown: its updates, its validations and what happened to it."""

from __future__ import annotations

from collections.abc import Callable

from evener.ps.master.access.quotas import MOST_EVENT_BYTES, MOST_EVENTS
from evener.records.events import RunEvent
from evener.records.history import Entry, History, NodeWork
from evener.records.record import Epoch, Event, Validation
from evener.sync.messages import Update

_EVENT_BYTES = 256
"""That an event takes besides its message."""


class RunJournal:
    """Of one run.

    Args:
        history: that remembers.
        clock: seconds.

    Attributes:
        history: see above.
        events: that nobody was shown yet.
    """

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        self.history = history
        self.events: list[RunEvent] = []
        self._clock = clock
        self._event_bytes = sum(_EVENT_BYTES + len(event.message) for event in history.events)
        self._has_more = any(event.kind == "more events" for event in history.events)
        self._updated_at = clock()

    def start_timing(self) -> None:
        """What has passed until now is no part of the next update."""
        self._updated_at = self._clock()

    def note(self, step: int, kind: str, message: str, nodes: tuple[str, ...]) -> None:
        """Write an event down, which is about `nodes`, and have it shown."""
        event = Event(step=step, kind=kind, message=message, nodes=nodes)
        self._event_bytes += _EVENT_BYTES + len(message)
        if len(self.history.events) < MOST_EVENTS and self._event_bytes <= MOST_EVENT_BYTES:
            self.history.events.append(event)
            self.events.append(event)
        elif not self._has_more:
            self._has_more = True
            kept = len(self.history.events)
            more = Event(step=event.step, kind="more events", message=f"only the first {kept} are kept")
            self.history.events.append(more)
            self.events.append(more)

    def updated(self, update: Update, works: dict[str, NodeWork]) -> None:
        """Write an update down, with what the nodes did for it."""
        now, n, stale, history = self._clock(), update.num_samples, update.staleness, self.history
        if update.loss is not None:
            history.loss = update.loss
        seconds, loss = now - self._updated_at, history.loss * n
        staleness = sum(stale.values())
        history.add(Entry(update.version, update.epoch, n, loss, seconds, 1, len(stale), staleness, works))
        self._updated_at = now

    def validated(self, validation: Validation) -> None:
        """Write a validation down; the time that it took is nobody's update."""
        self.start_timing()
        self.history.validations.append(validation)
        self.events.append(validation)
        self.epoch_ended(validation.step, validation.epoch, validation)

    def epoch_ended(self, step: int, epoch: int, validation: Validation | None = None) -> None:
        """Have it shown that an epoch has ended, and was validated if it is to be."""
        ended = Epoch(step=step, epoch=epoch, loss=self.history.loss_of(epoch), validation=validation)
        self.history.epochs.append(ended)
        self.events.append(ended)
