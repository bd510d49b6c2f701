"""Events of a run whose ranks work together, until they are sent to subscribers; their size is bounded."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from typing import IO

import msgspec

from evener.ps.master.access.quotas import Allowance
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.record import Event, Step, TrainRecord, Validation

MAX_EVENT_BYTES = 2**17
"""Limit of one encoded event; larger ones are ignored."""
_MAX_PENDING_BYTES = 2**20
"""Limit of the steps that wait to be sent; other events have lower limits."""
_AT_ONCE_BYTES, _BYTES_PER_SECOND = 2**19, 2**13
"""Limits of all other events; steps are summed, and sent a few times a second."""


class RankNews:
    """Events of one run.

    Args:
        clock: seconds.

    Attributes:
        events: events that were not sent yet.
        plan, phase, step, validation: the last of each kind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._record: IO[bytes] | None = None
        self.plan: Plan | None = None
        self.phase: Phase | None = None
        self.step: Step | None = None
        self.validation: Validation | None = None
        self.events: list[RunEvent] = []
        self._pending_bytes = 0
        self._allowance = Allowance(_AT_ONCE_BYTES, _BYTES_PER_SECOND, clock)

    def add(self, events: Iterable[tuple[int, RunEvent]]) -> None:
        """Add events of the ranks, each with its size in bytes."""
        for size, event in events:
            if isinstance(event, TrainRecord):
                self._keep(event)
            elif isinstance(event, Step):
                is_summed = self.step is not None and len(self.step.nodes) == len(event.nodes)
                self.step = event
                if self._pending_bytes + size <= _MAX_PENDING_BYTES and (is_summed or self._allowance.take(size)):
                    self._pending_bytes += size
                    self.events.append(event)
            else:
                self._remember(event)
                if self._allowance.take(size):
                    self.events.append(event)

    @property
    def has_record(self) -> bool:
        """Whether the ranks have sent the record of the run."""
        return self._record is not None

    @property
    def record(self) -> bytes:
        """The record of the run as JSON; empty before."""
        if self._record is None:
            return b""
        self._record.seek(0)
        return self._record.read()

    def forget_record(self) -> None:
        """Forget the record: the run restarts."""
        if self._record is not None:
            self._record.close()
            self._record = None

    def note(self, kind: str, message: str, nodes: tuple[str, ...]) -> None:
        """Add an event about `nodes`."""
        event = Event(step=self.step.step if self.step else 0, kind=kind, message=message, nodes=nodes)
        if self._allowance.take(len(message) + sum(map(len, nodes))):
            self.events.append(event)

    def take(self) -> list[RunEvent]:
        """Return the events since the last call."""
        events, self.events, self._pending_bytes = self.events, [], 0
        return events

    @property
    def so_far(self) -> list[RunEvent]:
        """Events for a new subscriber: the plan and the phase."""
        return [event for event in (self.plan, self.phase) if event is not None]

    def _keep(self, record: TrainRecord) -> None:
        """Store a record, which may be large, in a temporary file."""
        self.forget_record()
        self._record = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `forget_record`
        self._record.write(msgspec.json.encode(record))

    def _remember(self, event: RunEvent) -> None:
        if isinstance(event, Plan):
            self.plan = event
        elif isinstance(event, Phase):
            self.phase = event
        elif isinstance(event, Validation):
            self.validation = event
