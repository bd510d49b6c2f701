"""The format of events.jsonl and its readers: first all events so far, quickly, then new ones.

    a line:    {"time": when, "events": [[kind, event], ...]}             events of an interval, its steps summed
    a chapter: {"back": where the last one is, "time": ..., "events": ..}  events of the 64 lines since, steps summed

A new reader of a large file reads its chapters, from the last one backwards, and the lines after them: 100,000 lines
are 1,600 chapters. A reader that follows the file, or reads a small one, reads lines, and skips chapters.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.records.decoding import decode_json
from evener.records.errors import first_line
from evener.records.events import RunEvent, decode_events
from evener.records.record import Event, TrainRecord
from evener.records.schema import NOT_DECODED

EVENTS_FILE = "events.jsonl"
_MARK = b'{"back":'
_SMALL = 1 << 22
"""Size up to which a file is read line by line within half a second, so that curves have all points."""


class LogLine(msgspec.Struct):
    """Events of an interval, encoded by `encode_events`; `time` in seconds since 1970."""

    time: float
    events: msgspec.Raw


class LogChapter(msgspec.Struct):
    """Events of many intervals, and the offset of the chapter before; None before the first."""

    back: int | None
    time: float
    events: msgspec.Raw


class Moment(NamedTuple):
    """Some events, and the time when the last of them was written, in seconds since 1970."""

    time: float
    events: list[RunEvent]


class EventTail:
    """Reads the events of a run: first all events so far, in chapters; then new ones.

    Args:
        path: path of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> list[Moment]:
        """Return the events since the last call, in order. Raises OSError."""
        if not self._path.exists():
            return []
        chapters: list[Moment] = []
        if self._offset == 0 and self._path.stat().st_size > _SMALL:
            chapters, self._offset = _chapters(self._path)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        return [*chapters, *_moments(lines)]


def last_chapter(path: Path) -> int | None:
    """Return the offset of the last complete chapter of a log; None if it has none. Raises OSError."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            end = len(view)
            while (at := view.rfind(b"\n" + _MARK, 0, end)) >= 0:
                if _is_whole(view[at + 1 : view.find(b"\n", at + 1)]):
                    return at + 1
                end = at
    return None


def lines_after(path: Path, chapter: int | None) -> list[Moment]:
    """Return the events after the chapter at offset `chapter`, the last one of a log. Raises OSError."""
    with path.open("rb") as file:
        file.seek(chapter or 0)
        return _moments(file.read().split(b"\n"))


def events_of(record: TrainRecord) -> list[RunEvent]:
    """Return the events of a run of which only the record exists."""
    bare = msgspec.structs.replace(record, steps=(), validations=(), events=())
    return [record.plan, *record.steps, *record.validations, *record.events, bare]


def _moments(lines: list[bytes]) -> list[Moment]:
    """Return the events of all lines that are no chapters."""
    return [_moment(line, LogLine) for line in lines if line and not line.startswith(_MARK)]


def _moment(line: bytes, kind: type[LogLine | LogChapter]) -> Moment:
    """Return the events of a line; of a damaged line, an event that says so."""
    try:
        log_line = decode_json(line, kind)
        return Moment(log_line.time, decode_events(bytes(log_line.events)))
    except (*NOT_DECODED, KeyError) as error:
        damaged = Event(step=0, kind="damaged line", message=f"a line of the log cannot be read: {first_line(error)}")
        return Moment(0.0, [damaged])


def _chapters(path: Path) -> tuple[list[Moment], int]:
    """Return all chapters, and the offset of the lines after the last one."""
    chapters: list[Moment] = []
    back, after = last_chapter(path), 0
    with path.open("rb") as file:
        while back is not None:
            file.seek(back)
            line = file.readline()
            after = after or file.tell()
            chapters.append(_moment(line, LogChapter))
            back = _chapter_before(line, back)
    return chapters[::-1], after


def _chapter_before(line: bytes, begin: int) -> int | None:
    """Return the offset of the chapter before `line`, which is at offset `begin`; None if it has no earlier one."""
    try:
        back = decode_json(line, LogChapter).back
    except NOT_DECODED:
        return None
    return back if back is not None and 0 <= back < begin else None


def _is_whole(line: bytes) -> bool:
    """Return whether a chapter is complete; its writer may have died."""
    try:
        decode_json(line, LogChapter)
    except NOT_DECODED:
        return False
    return True
