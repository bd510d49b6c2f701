"""Folders of runs -> messages to a page: each page is sent what it does not have yet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from evener.records.errors import InvalidFile, first_line
from evener.records.event_tail import EVENTS_FILE, EventTail, Moment, events_of
from evener.records.events import Phase
from evener.records.history import Entry
from evener.records.record import Event, TrainRecord, Validation
from evener.records.schema import read_noun
from evener.records.search_record import STUDY_FILE, SearchRecord
from evener.report.live.live_run import LiveRun
from evener.report.live.picture import Message, Told
from evener.report.scalars import scalars_of_validation

_RECORD = "record.json"
_FILES = (EVENTS_FILE, _RECORD, STUDY_FILE)
"""By one of which a folder is known as that of a run, or of a search."""
_MOST_POINTS = 2000


class Source:
    """A run's folder, and the run as far as it has been read.

    Args:
        folder: of the run.
        name: that the page shows.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.run = folder, LiveRun(name)
        self._tail = EventTail(folder / EVENTS_FILE)
        self._study, self._studied = folder / STUDY_FILE, 0
        self.search: SearchRecord | None = None
        """What a search has found, if this is the folder of one."""

    def poll(self) -> LiveRun:
        """Read what has been written since; what cannot be read, the run says."""
        try:
            for moment in self._moments():
                self.run.take(moment)
        except (OSError, InvalidFile) as error:
            self.run.take(Moment(0.0, [Phase(what="failed", detail=first_line(error))]))
        return self.run

    def _moments(self) -> list[Moment]:
        if self._study.is_file():
            return self._search_moments()
        found = self._tail.read()
        if not found and self.run.revision == 0 and (self._folder / _RECORD).is_file():
            return [Moment(0.0, events_of(read_noun(self._folder / _RECORD, TrainRecord)))]
        return found

    def _search_moments(self) -> list[Moment]:
        """How a search stands, if that has been written anew."""
        changed = self._study.stat()
        if changed.st_mtime_ns == self._studied:
            return []
        self._studied = changed.st_mtime_ns
        self.search = read_noun(self._study, SearchRecord)
        return [Moment(changed.st_mtime, [_phase_of(self.search)])]


class Sources:
    """All runs that a page can show.

    Args:
        paths: folders of runs, or folders of such folders, which are looked into again and again.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._found = [path.resolve() for path in paths], dict[Path, Source]()

    def names(self) -> list[str]:
        """Of the runs, the newest first."""
        return [source.run.name for source in self._all()]

    def find(self, name: str) -> Source | None:
        """The run of this name; the newest one if the name is empty, or of none."""
        sources = self._all()
        return next((one for one in sources if one.run.name == name), sources[0] if sources else None)

    def abandon(self) -> None:
        """Whoever wrote the events is gone: the runs say so that are not over."""
        for source in self._all():
            source.poll().abandon()

    def _all(self) -> list[Source]:
        folders = [folder for path in self._paths for folder in (path, *_inside(path)) if _is_run(folder)]
        for folder in folders:
            if folder not in self._found:
                self._found[folder] = Source(folder, self._name(folder))
        newest = sorted(dict.fromkeys(folders), key=_changed, reverse=True)
        return [self._found[folder] for folder in newest]

    def _name(self, folder: Path) -> str:
        """That of the folder, with a number behind it where another one has this name."""
        taken = {source.run.name for source in self._found.values()}
        names = (folder.name if number == 1 else f"{folder.name} ({number})" for number in count(1))
        return next(name for name in names if name not in taken)


class Cursor:
    """What one page has of a run.

    Args:
        source: of the run.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._revision, self._every, self._sent, self._told = -1, 0, 0, 0
        self._names: list[str] = []
        self._last: Entry | None = None

    def next(self, runs: list[str]) -> Message | None:
        """What the page lacks; None if that is nothing.

        Args:
            runs: names of all.
        """
        run = self.source.run
        if run.revision == self._revision:
            return None
        history = run.history
        is_whole = self._revision < 0 or history.every != self._every or history.names != self._names
        if is_whole:
            self._sent = self._told = 0
            self._last = None
        points, columns = run.points(self._sent), run.columns(self._new_entries(run))
        new = min(run.num_told - self._told, len(run.told))
        told = [_told(time, event) for time, event in list(run.told)[len(run.told) - new :]]
        self._revision, self._every, self._names = run.revision, history.every, history.names
        self._sent, self._told = len(history.entries), run.num_told
        self._last = run.strip[-1] if run.strip else None
        return Message(
            runs=runs,
            is_whole=is_whole,
            picture=run.picture(),
            names=history.names,
            points=points[:: max(1, -(-len(points) // _MOST_POINTS))],
            columns=columns,
            told=told,
            search=self.source.search,
        )

    def _new_entries(self, run: LiveRun) -> list[Entry]:
        found: list[Entry] = []
        for entry in reversed(run.strip):
            if entry is self._last:
                break
            found.append(entry)
        return found[::-1]


def _phase_of(search: SearchRecord) -> Phase:
    over = sum(trial.outcome is not None for trial in search.trials)
    detail = f"{over} of {max(search.wanted, len(search.trials))} trials are over"
    return Phase(what="over" if search.is_over else "searching", detail=detail)


def _told(time: float, event: Event | Validation) -> Told:
    if isinstance(event, Event):
        return Told(time=time, step=event.step, kind=event.kind, message=event.message, nodes=event.nodes)
    scalars = scalars_of_validation(event)
    words = ", ".join(f"{name.removesuffix('/validation')} {value:.4g}" for name, value in scalars.items())
    return Told(time=time, step=event.step, kind="validation", message=words, scalars=scalars)


def _inside(path: Path) -> list[Path]:
    return [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _changed(folder: Path) -> float:
    """When the run began: a name may say it, the first file does."""
    return next((folder / name).stat().st_mtime for name in _FILES if (folder / name).is_file())
