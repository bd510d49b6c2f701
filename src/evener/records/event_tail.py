"""What events.jsonl is made of, and how it is read: first what there is, quickly, then what comes.

    a line:    {"time": when, "events": [[kind, event], ...]}             what happened in a moment, its steps summed
    a chapter: {"back": where the last one is, "time": ..., "events": ..}  that of the 64 lines since, its steps summed

Who comes late reads the chapters of a large file, from the last one backwards, and the lines after them: 100,000 lines
are 1,600 chapters. Who follows, or reads a small file, reads lines, and skips chapters.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.records.errors import first_line
from evener.records.events import RunEvent, decode_events
from evener.records.record import Event, TrainRecord
from evener.records.schema import NOT_DECODED

EVENTS_FILE = "events.jsonl"
_MARK = b'{"back":'
_SMALL = 1 << 22
"""Bytes of a file that is read line by line within half a second: every moment is a point of its curves."""


class LogLine(msgspec.Struct):
    """What happened in a moment, `events` as `encode_events` gives them; `time` in seconds since 1970."""

    time: float
    events: msgspec.Raw


class LogChapter(msgspec.Struct):
    """What happened in many moments, and where in the file the chapter before begins; None before the first."""

    back: int | None
    time: float
    events: msgspec.Raw


class Moment(NamedTuple):
    """Some events, and when the last of them was written down, in seconds since 1970."""

    time: float
    events: list[RunEvent]


class EventTail:
    """Reads the events of a run: first all that there are, in chapters; then what comes.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> list[Moment]:
        """What has been written since this was last asked, in order. Raises OSError."""
        if not self._path.exists():
            return []
        found: list[Moment] = []
        if self._offset == 0 and self._path.stat().st_size > _SMALL:
            found, self._offset = _chapters(self._path)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        return [*found, *_moments(lines)]


def last_chapter(path: Path) -> int | None:
    """Where the last whole chapter of a log begins; None if it has none. Raises OSError."""
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
    """What no chapter of a log holds yet, if the last one begins at `chapter`. Raises OSError."""
    with path.open("rb") as file:
        file.seek(chapter or 0)
        return _moments(file.read().split(b"\n"))


def events_of(record: TrainRecord) -> list[RunEvent]:
    """A run of which only the record is left, as events."""
    bare = msgspec.structs.replace(record, steps=(), validations=(), events=())
    return [record.plan, *record.steps, *record.validations, *record.events, bare]


def _moments(lines: list[bytes]) -> list[Moment]:
    """Of those lines that are no chapters."""
    return [_moment(line, LogLine) for line in lines if line and not line.startswith(_MARK)]


def _moment(line: bytes, kind: type[LogLine | LogChapter]) -> Moment:
    """The events of a line; of one that cannot be read, an event that says so."""
    try:
        found = msgspec.json.decode(line, type=kind)
        return Moment(found.time, decode_events(bytes(found.events)))
    except (*NOT_DECODED, KeyError) as error:
        damaged = Event(step=0, kind="damaged line", message=f"a line of the log cannot be read: {first_line(error)}")
        return Moment(0.0, [damaged])


def _chapters(path: Path) -> tuple[list[Moment], int]:
    """All chapters, and where the lines after the last one begin."""
    found: list[Moment] = []
    back, after = last_chapter(path), 0
    with path.open("rb") as file:
        while back is not None:
            file.seek(back)
            line = file.readline()
            after = after or file.tell()
            found.append(_moment(line, LogChapter))
            back = _chapter_before(line, back)
    return found[::-1], after


def _chapter_before(line: bytes, begin: int) -> int | None:
    """Where the chapter before that of `line`, which begins at `begin`, does; None if `line` names no earlier place."""
    try:
        back = msgspec.json.decode(line, type=LogChapter).back
    except NOT_DECODED:
        return None
    return back if back is not None and 0 <= back < begin else None


def _is_whole(line: bytes) -> bool:
    """Whether a chapter is; whoever wrote it may have died."""
    try:
        msgspec.json.decode(line, type=LogChapter)
    except NOT_DECODED:
        return False
    return True
