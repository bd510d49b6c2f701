"""Messages to the live page, read from the folders of runs: each page gets what it does not have yet.

A run is compared with others by its curves over time and samples, and by its figures so far, or its final ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import NamedTuple

from evener.records.errors import InvalidFile, first_line
from evener.records.event_tail import EVENTS_FILE, EventTail, Moment, events_of
from evener.records.events import Phase
from evener.records.history import Entry
from evener.records.record import RECORD, Event, TrainRecord, Validation
from evener.records.schema import Part, read_noun
from evener.records.search_record import STUDY_FILE, SearchRecord
from evener.report.live.live_run import LiveRun
from evener.report.live.picture import LogEntry, Message
from evener.report.scalars import scalars_of_validation

_MAX_LOSSES = 1000


class ComparedPoint(NamedTuple):
    """A point of a curve: seconds in steps and samples until then, and the value."""

    seconds: float
    samples: int
    value: float


class ComparedRun(Part, frozen=True, kw_only=True):
    """One run beside others.

    Attributes:
        run: name of the run.
        task: name of its task.
        phase: current phase.
        is_over: whether the figures are final.
        seconds: training time: of the record, or in steps so far.
        samples: number of samples trained on so far.
        samples_per_second: average speed.
        ideal: fraction of the speed that the nodes would reach if none waited; None if unknown.
        sent_bytes: bytes sent by all nodes.
        loss: mean training loss of the last epoch.
        accuracy: last validation accuracy, in [0, 1].
        losses: training loss.
        accuracies: validation accuracy.
    """

    run: str
    task: str
    phase: str
    is_over: bool
    num_nodes: int
    seconds: float
    samples: int
    samples_per_second: float
    ideal: float | None
    sent_bytes: int
    loss: float | None
    accuracy: float | None
    losses: list[ComparedPoint]
    accuracies: list[ComparedPoint]


class Comparison(Part, frozen=True, kw_only=True):
    """The runs that a page compares.

    Attributes:
        choices: names of all runs that can be compared, newest first.
        runs: the chosen ones.
    """

    choices: list[str]
    runs: list[ComparedRun]


def compared(run: LiveRun) -> ComparedRun:
    """Return `run` as it is compared with others."""
    history, record = run.history, run.record
    entries = [*history.entries, *([history.open] if history.open.steps else [])]
    seconds = list(accumulate(entry.seconds for entry in entries))
    samples = list(accumulate(entry.samples for entry in entries))
    steps = [entry.step for entry in entries]
    losses = [
        ComparedPoint(when, count, entry.mean_loss)
        for entry, when, count in zip(entries, seconds, samples, strict=True)
        if entry.mean_loss is not None
    ]
    accuracies = [
        ComparedPoint(seconds[done - 1], samples[done - 1], one.accuracy)
        for _, one in run.log
        if isinstance(one, Validation) and one.accuracy is not None and (done := bisect_right(steps, one.step))
    ]
    picture = run.picture()
    total_seconds, total_samples = (seconds or [0.0])[-1], (samples or [0])[-1]
    sent = sum(node.bytes_sent for node in record.nodes) if record else sum(w.sent for w in history.totals.values())
    return ComparedRun(
        run=run.name,
        task=picture.task,
        phase=picture.phase,
        is_over=run.is_over,
        num_nodes=len(history.names),
        seconds=record.seconds if record else total_seconds,
        samples=total_samples,
        samples_per_second=total_samples / total_seconds if total_seconds else 0.0,
        ideal=picture.ideal,
        sent_bytes=sent,
        loss=picture.loss,
        accuracy=accuracies[-1].value if accuracies else None,
        losses=losses[:: max(1, -(-len(losses) // _MAX_LOSSES))],
        accuracies=accuracies,
    )


_FILES = (EVENTS_FILE, RECORD, STUDY_FILE)
"""Files by which a folder is recognised as that of a run or of a search."""
_MAX_POINTS = 2000
MAX_COMPARED = 7
"""Runs that are compared at a time: as many as there are colours of lines."""


class Source:
    """The folder of a run, and the run as far as it has been read.

    Args:
        folder: folder of the run.
        name: name that the page shows.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.run = folder, LiveRun(name)
        self._tail = EventTail(folder / EVENTS_FILE)
        self._study, self._study_mtime_ns = folder / STUDY_FILE, 0
        self.search: SearchRecord | None = None
        """State of the search, if this is the folder of one."""

    @property
    def is_search(self) -> bool:
        """Whether this is the folder of a search."""
        return self._study.is_file()

    def poll(self) -> LiveRun:
        """Read what was written since the last call; an unreadable file becomes a `failed` phase of the run."""
        try:
            for moment in self._moments():
                self.run.take(moment)
        except (OSError, InvalidFile) as error:
            self.run.take(Moment(0.0, [Phase(what="failed", detail=first_line(error))]))
        return self.run

    def _moments(self) -> list[Moment]:
        if self.is_search:
            return self._search_moments()
        moments = self._tail.read()
        if not moments and self.run.revision == 0 and (self._folder / RECORD).is_file():
            return [Moment(0.0, events_of(read_noun(self._folder / RECORD, TrainRecord)))]
        return moments

    def _search_moments(self) -> list[Moment]:
        """Return the state of the search if its file has changed."""
        status = self._study.stat()
        if status.st_mtime_ns == self._study_mtime_ns:
            return []
        self._study_mtime_ns = status.st_mtime_ns
        self.search = read_noun(self._study, SearchRecord)
        return [Moment(status.st_mtime, [_phase_of(self.search)])]


class Sources:
    """All runs that a page can show.

    Args:
        paths: folders of runs, or folders of such folders; these are scanned again at every call.
        beside: folders of further runs, with which a page can only compare these.
    """

    def __init__(self, paths: Sequence[Path], beside: Sequence[Path] = ()) -> None:
        self._paths, self._beside = ([path.resolve() for path in several] for several in (paths, beside))
        self._by_folder = dict[Path, Source]()

    def names(self) -> list[str]:
        """Return the names of the runs, newest first."""
        return [source.run.name for source in self._all()]

    def find(self, name: str) -> Source | None:
        """Return the run of this name, or the newest run if none has this name."""
        sources = self._all()
        return next((source for source in sources if source.run.name == name), sources[0] if sources else None)

    def compare(self, names: Sequence[str]) -> Comparison:
        """Return the runs of these names as they are compared, and the names of all that can be; no searches."""
        runs = [source for source in self._among([*self._paths, *self._beside]) if not source.is_search]
        chosen = [source for source in runs if source.run.name in names]
        return Comparison(
            choices=[source.run.name for source in runs],
            runs=[compared(source.poll()) for source in chosen[:MAX_COMPARED]],
        )

    def abandon(self) -> None:
        """Mark all unfinished runs as abandoned: the process that wrote their events is gone."""
        for source in self._all():
            source.poll().abandon()

    def _all(self) -> list[Source]:
        return self._among(self._paths)

    def _among(self, paths: Sequence[Path]) -> list[Source]:
        folders = [folder for path in paths for folder in (path, *_inside(path)) if _is_run(folder)]
        for folder in folders:
            if folder not in self._by_folder:
                self._by_folder[folder] = Source(folder, self._name(folder))
        newest = sorted(dict.fromkeys(folders), key=_changed, reverse=True)
        return [self._by_folder[folder] for folder in newest]

    def _name(self, folder: Path) -> str:
        """Return the folder's name, with a number appended if another run has this name."""
        taken = {source.run.name for source in self._by_folder.values()}
        names = (folder.name if number == 1 else f"{folder.name} ({number})" for number in count(1))
        return next(name for name in names if name not in taken)


class Cursor:
    """The position up to which one page has received a run.

    Args:
        source: the run.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._revision, self._every, self._num_points, self._num_logged = -1, 0, 0, 0
        self._names: list[str] = []
        self._last: Entry | None = None

    def next(self, runs: list[str]) -> Message | None:
        """Return what the page does not have yet; None if it has everything.

        Args:
            runs: names of all runs.
        """
        run = self.source.run
        if run.revision == self._revision:
            return None
        history = run.history
        is_whole = self._revision < 0 or history.every != self._every or history.names != self._names
        if is_whole:
            self._num_points = self._num_logged = 0
            self._last = None
        points, columns = run.points(self._num_points), run.columns(self._new_entries(run))
        num_new = min(run.num_logged - self._num_logged, len(run.log))
        log = [_log_entry(time, event) for time, event in list(run.log)[len(run.log) - num_new :]]
        self._revision, self._every, self._names = run.revision, history.every, history.names
        self._num_points, self._num_logged = len(history.entries), run.num_logged
        self._last = run.strip[-1] if run.strip else None
        return Message(
            runs=runs,
            is_whole=is_whole,
            picture=run.picture(),
            names=history.names,
            points=points[:: max(1, -(-len(points) // _MAX_POINTS))],
            columns=columns,
            log=log,
            search=self.source.search,
        )

    def _new_entries(self, run: LiveRun) -> list[Entry]:
        entries: list[Entry] = []
        for entry in reversed(run.strip):
            if entry is self._last:
                break
            entries.append(entry)
        return entries[::-1]


def _phase_of(search: SearchRecord) -> Phase:
    num_over = sum(trial.outcome is not None for trial in search.trials)
    detail = f"{num_over} of {max(search.wanted, len(search.trials))} trials are over"
    return Phase(what="over" if search.is_over else "searching", detail=detail)


def _log_entry(time: float, event: Event | Validation) -> LogEntry:
    if isinstance(event, Event):
        return LogEntry(time=time, step=event.step, kind=event.kind, message=event.message, nodes=event.nodes)
    scalars = scalars_of_validation(event)
    text = ", ".join(f"{name.removesuffix('/validation')} {value:.4g}" for name, value in scalars.items())
    return LogEntry(time=time, step=event.step, kind="validation", message=text, scalars=scalars)


def _inside(path: Path) -> list[Path]:
    return [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _changed(folder: Path) -> float:
    """Return the time at which the folder's first file was last written, in seconds since 1970."""
    return next((folder / name).stat().st_mtime for name in _FILES if (folder / name).is_file())
