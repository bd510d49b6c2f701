"""The journal of a run: updates, validations and events, as remembered and as sent to subscribers."""

from __future__ import annotations

from collections.abc import Callable

from evener.agreements.messages import Update
from evener.ps.master.access.quotas import MAX_EVENT_BYTES, MAX_EVENTS
from evener.records.events import RunEvent
from evener.records.history import Entry, History, NodeWork
from evener.records.record import Epoch, Event, Validation

_EVENT_BYTES = 256
"""Bytes of an event besides its message."""


class RunJournal:
    """The journal of one run.

    Args:
        history: history of the run.
        clock: seconds.

    Attributes:
        history: see above.
        events: events that were not sent yet.
    """

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        self.history = history
        self.events: list[RunEvent] = []
        self._clock = clock
        self._event_bytes = sum(_EVENT_BYTES + len(event.message) for event in history.events)
        self._has_more = any(event.kind == "more events" for event in history.events)
        self._updated_at = clock()

    def start_timing(self) -> None:
        """Exclude the time until now from the next update."""
        self._updated_at = self._clock()

    def note(self, step: int, kind: str, message: str, nodes: tuple[str, ...]) -> None:
        """Add an event about `nodes`."""
        event = Event(step=step, kind=kind, message=message, nodes=nodes)
        self._event_bytes += _EVENT_BYTES + len(message)
        if len(self.history.events) < MAX_EVENTS and self._event_bytes <= MAX_EVENT_BYTES:
            self.history.events.append(event)
            self.events.append(event)
        elif not self._has_more:
            self._has_more = True
            count = len(self.history.events)
            more = Event(step=event.step, kind="more events", message=f"only the first {count} are kept")
            self.history.events.append(more)
            self.events.append(more)

    def updated(self, update: Update, works: dict[str, NodeWork]) -> None:
        """Add an update, with the work of the nodes for it."""
        now, n, stale, history = self._clock(), update.num_samples, update.staleness, self.history
        if update.loss is not None:
            history.loss = update.loss
        seconds, loss = now - self._updated_at, history.loss * n
        staleness = sum(stale.values())
        history.add(Entry(update.version, update.epoch, n, loss, seconds, 1, len(stale), staleness, works))
        self._updated_at = now

    def validated(self, validation: Validation) -> None:
        """Add a validation; its time is excluded from the updates."""
        self.start_timing()
        is_known = any(event.kind == "more validations" for event in self.history.events)
        if self.history.add_validation(validation) and not is_known:
            self.note(validation.step, "more validations", "only some of the earlier ones are kept", ())
        self.events.append(validation)
        self.epoch_ended(validation.step, validation.epoch, validation)

    def epoch_ended(self, step: int, epoch: int, validation: Validation | None = None) -> None:
        """Add the end of an epoch, with its validation if there is one."""
        ended = Epoch(step=step, epoch=epoch, loss=self.history.loss_of(epoch), validation=validation)
        self.history.add_epoch(ended)
        self.events.append(ended)
