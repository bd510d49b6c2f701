"""Writes events.jsonl, the log of all events of a run, which only grows; `event_tail` reads it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from evener.records.event_tail import LogChapter, LogLine, Moment, last_chapter, lines_after
from evener.records.events import RunEvent, encode_events
from evener.records.history import Entry
from evener.records.plan import Plan
from evener.records.record import Epoch, Step, TrainRecord

_INTERVAL_S = 0.25
"""Seconds whose steps are summed in one line, times the number of nodes divided by 16."""
_NODES = 16
_CHAPTER = 64
_COARSER_BYTES = 2**25


class _Sum:
    """Events, with all steps between two plans summed into one."""

    def __init__(self) -> None:
        self._events: list[RunEvent] = []
        self._entry = Entry()
        self._columns = 0

    def add(self, event: RunEvent) -> None:
        """Add an event."""
        if isinstance(event, Step):
            if len(event.nodes) != self._columns:
                self._close()
            self._columns = len(event.nodes)
            self._entry.add(Entry.of(event, list(map(str, range(self._columns)))))
            return
        if isinstance(event, Plan):
            self._close()
        self._events.append(event)

    def take(self) -> list[RunEvent]:
        """Return and remove all events."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._entry.steps:
            self._events.append(self._entry.as_step(list(map(str, range(self._columns)))))
        self._entry = Entry()


def _encoded(line: LogLine | LogChapter) -> bytes:
    return msgspec.json.encode(line) + b"\n"


class EventLog:
    """Writes the events of a run, one after the other; close it. An existing log is continued.

    Args:
        path: path of the file.
        notify: called once if the disk is full or gone; nothing is written from then on.
        clock: seconds since 1970.
        private: whether the file is readable for this user only.
        show: called with every line, whether it could be written or not.
        most_bytes: limit of the file.
    """

    def __init__(
        self,
        path: Path,
        notify: Callable[[str], object],
        clock: Callable[[], float] = time.time,
        *,
        private: bool = False,
        show: Callable[[Moment], object] = bool,
        most_bytes: int | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._path, self._notify, self._clock, self._show = path, notify, clock, show
        self._lines, self._moment, self._chapter = 0, _Sum(), _Sum()
        self._written = 0.0
        self._back: int | None = None
        self._file: BinaryIO | None = None
        try:
            path.touch(mode=0o600 if private else 0o666)
            self._continue()
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._fail(error)
        self._offset = self._file.tell() if self._file else 0
        if self._offset:  # an earlier process may have died within a line
            self._write(b"\n")

    def add(self, event: RunEvent) -> None:
        """Add `event`: steps are summed over an interval, others are written at once; ends of epochs are ignored."""
        if isinstance(event, Epoch):
            return
        if isinstance(event, TrainRecord):  # its steps are in the log already
            event = msgspec.structs.replace(event, steps=(), validations=(), events=())
        self._moment.add(event)
        wait = self._seconds_apart(event) if isinstance(event, Step) else 0.0
        if self._clock() - self._written >= wait:
            self.flush()

    def _seconds_apart(self, step: Step) -> float:
        """Return the seconds between two lines of steps, which double as the file grows, to bound it."""
        return _INTERVAL_S * max(1, len(step.nodes) // _NODES) * 2.0 ** (self._offset // _COARSER_BYTES)

    def flush(self) -> None:
        """Write all events to the file."""
        if not (events := self._moment.take()):
            return
        self._written = self._clock()
        for event in events:
            self._chapter.add(event)
        self._write(_encoded(LogLine(self._written, msgspec.Raw(encode_events(events)))))
        self._show(Moment(self._written, events))
        self._lines += 1
        if self._lines % _CHAPTER == 0:
            begin, events = self._offset, self._chapter.take()
            self._write(_encoded(LogChapter(self._back, self._written, msgspec.Raw(encode_events(events)))))
            self._back = begin

    def close(self) -> None:
        """Write the last line, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _continue(self) -> None:
        """Load the events of an existing log that are in no chapter yet."""
        self._back = last_chapter(self._path)
        for moment in lines_after(self._path, self._back):
            self._lines += 1
            for event in moment.events:
                self._chapter.add(event)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        if self._most_bytes is not None and self._offset + len(data) > self._most_bytes:
            self._fail(OSError(errno.EFBIG, f"the limit is {self._most_bytes} bytes"))
            return
        try:
            self._file.write(data)
            self._offset += len(data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._file is not None:
            self._file.close()  # the file has no buffer
        self._file = None
        self._notify(f"cannot write {self._path} ({error.strerror}): the live page of this run has stopped")
