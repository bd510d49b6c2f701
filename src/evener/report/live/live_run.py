"""A run as the live page shows it: events go in, pictures and curve points come out. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any

from evener.records.event_tail import Moment
from evener.records.events import Phase, RunEvent
from evener.records.history import Entry, History, NodeWork, fraction_of_ideal
from evener.records.plan import WHOLE_MODEL, Assignment, Plan, is_pipeline
from evener.records.record import Event, NodeSummary, Step, TrainRecord, Validation
from evener.report.live.losses import Losses, slowest
from evener.report.live.picture import CurvePoint, NodePicture, Picture, StripColumn
from evener.report.live.routes import RoutePicture, routes

_RECENT_S = 2.0
"""Seconds of steps that count as the present."""
_MAX_STRIP_ENTRIES = 60
_MAX_LOG_ENTRIES = 2000
_STATES = {
    "node lost": "lost", "away": "away", "excluded": "excluded", "waits": "excluded", "expelled": "expelled",
    "left": "left", "dismissed": "left", "left out": "left out", "skipped": "late", "joined": "", "back": "",
    "replaced": "",
}  # fmt: skip
"""State that an event gives to its nodes; an empty state means that nothing is wrong."""
_AS_RANKS = "as ranks"
"""Kind of the event that nodes work together as ranks although an agreement was asked for."""
_ABSENT = ("lost", "away", "excluded", "expelled", "left", "left out")
"""States of nodes that send nothing."""
OVER = ("over", "stopped", "failed")
"""Phases that end a run."""


class LiveRun:
    """One run, as far as its events have arrived.

    Args:
        name: name of its folder.

    Attributes:
        history: steps of the run, in bounded memory.
        strip: the last entries.
        log: the last validations and events, each with the time at which it was written.
        num_logged: number of validations and events since the start.
        revision: number of moments that have arrived.
        epochs: number of epochs; 0 if it is unknown or meaningless.
        record: record of the run, without its steps; None before it has one.
    """

    def __init__(self, name: str) -> None:
        self.name, self.history, self.revision = name, History(keeps_news=False), 0
        self.strip: deque[Entry] = deque(maxlen=_MAX_STRIP_ENTRIES)
        self.log: deque[tuple[float, Event | Validation]] = deque(maxlen=_MAX_LOG_ENTRIES)
        self.num_logged = 0
        self._plan: Plan | None = None
        self._assigned: dict[str, Assignment] = {}
        self._fixed_samples_by_node: dict[str, float] = {}
        self._phase = Phase(what="starting")
        self.record: TrainRecord | None = None
        self._losses, self._speeds = Losses(), dict[str, NodeSpeed]()
        self._states: dict[str, tuple[str, str]] = {}
        self._written = 0.0
        self._began = 0.0
        self._are_ranks = False
        self._task = self._file = ""
        self._options: dict[str, str] = {}
        self.epochs = 0
        self._total, self._done_before = 0, 0

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._phase.what in OVER

    def take(self, moment: Moment) -> None:
        """Apply the events of `moment`."""
        self.revision += 1
        self._written = max(self._written, moment.time)
        self._began = self._began or moment.time
        for event in moment.events:
            self._take(event, moment.time)

    def abandon(self) -> None:
        """Mark the run as failed unless it is over: the process that wrote its events is gone."""
        if not self.is_over:
            self.revision += 1
            self._phase = Phase(what="failed", detail="the process that led the run is gone")

    def _take(self, event: RunEvent, time: float) -> None:
        if isinstance(event, Step):
            self._add(event)
        elif isinstance(event, Plan):
            self._plan = event
            self._assigned = {one.node: one for one in reversed(event.assignments)}
            self._leave_out(event)
            self._fixed_samples_by_node = {name: _fixed_samples(one) for name, one in self._assigned.items()}
        elif isinstance(event, Phase):
            self._begin(event)
        elif isinstance(event, TrainRecord):
            self.record, self.epochs = event, event.epochs
            self._options = event.options or self._options
            self._task = self._task or event.task
            self._phase = Phase(what="over")
        elif isinstance(event, Event | Validation):
            self.log.append((time, event))
            self.num_logged += 1
            if isinstance(event, Event):
                self._judge(event)

    def _leave_out(self, plan: Plan) -> None:
        """Set the state of the nodes that `plan` does without, and clear it for those that take part again."""
        out = {one.what: ("left out", one.reason) for one in plan.rejected if one.is_node}
        for name in self._assigned:
            if self._states.get(name, ("", ""))[0] == "left out":
                self._states[name] = ("", "")
        self._states |= {name: state for name, state in out.items() if name not in self._assigned}

    def _judge(self, event: Event) -> None:
        """Set the state of the event's nodes; other kinds, such as `busy machine`, appear in the log only."""
        self._are_ranks = self._are_ranks or event.kind == _AS_RANKS
        if event.kind in _STATES:
            self._states |= dict.fromkeys(event.nodes, (_STATES[event.kind], event.message))

    def _begin(self, phase: Phase) -> None:
        self._options = self._options | phase.options
        self._task, self._file = phase.task or self._task, phase.file or self._file
        if phase.num_samples:
            self._total, self.epochs = phase.num_samples, phase.epochs
            self._done_before = phase.done - self._counted()
        self._phase = phase

    def _add(self, step: Step) -> None:
        names = self._names(len(step.nodes))
        entry, before = Entry.of(step, names), self.history.last_step
        entry.steps = max(1, step.step - before)
        for name in names:
            self.history.add_node(name)
            if name not in self._speeds:
                self._speeds[name] = NodeSpeed()
        for name, work in entry.nodes.items():
            self._speeds[name].add(
                work.samples + entry.steps * self._fixed_samples_by_node.get(name, 0.0), work.busy_seconds
            )
            if work.samples and self._states.get(name, ("", ""))[0] == "late":
                self._states[name] = ("", "")
        self.history.add(entry)
        self.strip.append(entry)
        self._losses.add(entry)

    def _names(self, count: int) -> list[str]:
        """Return the names of a step's columns: the nodes of the plan, then those that joined."""
        known = [name for name in self._all_names() if self._states.get(name, ("", ""))[0] != "left out"]
        return [*known[:count], *(f"node {i}" for i in range(len(known), count))]

    def picture(self) -> Picture:
        """Return everything that the page shows except the curves."""
        entries = self._shown_entries()
        recent = _sum(entries)
        prediction, step = (self._plan.prediction if self._plan else None), self.history.last_step
        rate = recent.samples / recent.seconds if recent.seconds else 0.0
        samples_left = max(0, self._total - self._done_before - self._counted())
        return Picture(
            run=self.name,
            task=self._task,
            file=self._file,
            began=self._began,
            phase=self._phase.what,
            detail=self._phase.detail,
            strategy=self._plan.strategy if self._plan else "",
            is_pipeline=bool(self._plan and is_pipeline(self._plan.strategy)),
            is_over=self.is_over,
            written=self._written,
            step=step,
            epoch=self.history.epoch + 1 if step else 0,
            epochs=self.epochs,
            left_seconds=samples_left / rate if rate and self._total and not self.is_over else None,
            progress=self._progress(samples_left),
            samples_per_second=self.record.samples_per_second if self.record else rate,
            ideal=self._ideal(entries),
            loss=self.history.last_loss() if step else None,
            step_seconds=recent.seconds / recent.steps if recent.steps else None,
            predicted_seconds=prediction.step_seconds if prediction else None,
            predicted_rate=_rate(prediction.sent_bytes, prediction.communication_seconds) if prediction else None,
            advice=self._advice() if step else "",
            losses=self._losses.largest(),
            nodes=[self._node(name, recent) for name in self._all_names()],
            routes=self._routes(),
        )

    def _advice(self) -> str:
        divides_samples = self._plan is None or self._plan.strategy in WHOLE_MODEL
        return self._losses.advice(self._options, divides_samples=divides_samples)

    def _routes(self) -> list[RoutePicture]:
        """Return who sends what to whom, among the nodes that take part."""
        names = [name for name in self._all_names() if self._states.get(name, ("", ""))[0] not in _ABSENT]
        option = "" if self._are_ranks else self._options.get("--agreement", "")
        agreement = self.record.agreement if self.record else option
        return routes(self._plan, names, agreement) if self._plan else []

    def _counted(self) -> int:
        """Return the number of samples in the steps so far."""
        return sum(entry.samples for entry in (*self.history.entries, self.history.open))

    def _progress(self, samples_left: int) -> float | None:
        if self.record is not None:
            return 1.0
        return 1 - samples_left / self._total if self._total else None

    def _shown_entries(self) -> list[Entry]:
        """Return the entries of the last seconds, oldest first; all entries of a run that is over."""
        if self.is_over:
            return [*self.history.entries, *([self.history.open] if self.history.open.steps else [])]
        entries: list[Entry] = []
        seconds = 0.0
        for entry in reversed(self.strip):
            if seconds >= _RECENT_S:
                break
            entries.append(entry)
            seconds += entry.seconds
        return entries[::-1]

    def _ideal(self, entries: Sequence[Entry]) -> float | None:
        """Return the fraction reached of what the nodes could do without waiting."""
        if self.record is not None:
            return self.record.of_ideal
        return None if self._plan is None else fraction_of_ideal(entries, self._plan)

    def _all_names(self) -> Sequence[str]:
        planned = [a.node for a in self._plan.assignments] if self._plan else []
        return list(dict.fromkeys([*planned, *self.history.names, *self._states]))

    def _node(self, name: str, recent: Entry) -> NodePicture:
        work, assigned = recent.nodes.get(name, NodeWork()), self._assigned.get(name)
        speed = self._speeds.get(name, NodeSpeed())
        summary = self._summary(name)
        state, reason = self._states.get(name, ("", ""))
        if not state and not self.is_over and (slowdown := speed.slowdown) > 1:
            state, reason = "slow", f"{slowdown:.1f} times slower than it was"
        return NodePicture(
            name=name,
            device=assigned.device if assigned else "",
            stage=assigned.stage if assigned else 0,
            share=summary.share if summary is not None else self._share(work, recent, assigned),
            samples_per_second=work.samples / work.busy_seconds if work.busy_seconds else 0.0,
            waits=summary.waiting if summary is not None else _waiting(work),
            is_waited_for=name == slowest(recent.nodes),
            sent_per_second=work.sent / recent.seconds if recent.seconds else 0.0,
            sent_per_step=work.sent / recent.steps if recent.steps else 0.0,
            exchange_rate=_rate(work.sent, work.wait_seconds or 0.0),
            memory_bytes=self._memory(work, summary, assigned),
            cpu_cores=work.cpu_seconds / recent.seconds if recent.seconds else 0.0,
            state=state,
            reason=reason or (assigned.reason if assigned else ""),
        )

    def _share(self, work: NodeWork, recent: Entry, assigned: Assignment | None) -> float:
        samples = sum(node_work.samples for node_work in recent.nodes.values())
        if samples and self._plan is not None and self._plan.strategy in WHOLE_MODEL:
            return work.samples / samples
        return self._plan.part(assigned) if assigned is not None and self._plan is not None else 0.0

    def _memory(self, work: NodeWork, summary: NodeSummary | None, assigned: Assignment | None) -> int:
        """Return the peak memory in bytes, or the predicted one for a node that has not reported it yet."""
        peak_bytes = summary.peak_memory_bytes if summary is not None else work.memory
        return peak_bytes or (assigned.memory_bytes if assigned else 0)

    def _summary(self, name: str) -> NodeSummary | None:
        """Return what the record says about a node; None before the run has a record."""
        nodes = self.record.nodes if self.record else ()
        return next((node for node in nodes if node.name == name), None)

    def points(self, first: int) -> list[CurvePoint]:
        """Return the curve points of the history's entries from `first` on."""
        return [_point(entry, self.history.names) for entry in self.history.entries[first:]]

    def columns(self, entries: Sequence[Entry]) -> list[StripColumn]:
        """Return the columns of the strip, which show where the time of each node went."""
        return [_column(entry, self.history.names) for entry in entries]


def _sum(entries: Sequence[Entry]) -> Entry:
    total = Entry()
    for entry in entries:
        total.add(entry)
    return total


def _waiting(work: NodeWork) -> float:
    """Return the fraction of its time in steps that a node waited."""
    waited = work.wait_seconds or 0.0
    return waited / (waited + work.busy_seconds) if waited else 0.0


def _fixed_samples(assignment: Assignment) -> float:
    """Return the number of samples that take as long as the node's fixed cost per step."""
    return assignment.fixed_seconds / assignment.sample_seconds if assignment.sample_seconds else 0.0


def _rate(num_bytes: float, seconds: float) -> float | None:
    return num_bytes / seconds if seconds > 0 and num_bytes > 0 else None


def _point(entry: Entry, names: Sequence[str]) -> CurvePoint:
    rate = entry.samples / entry.seconds if entry.seconds else None
    total: Any = sum(work.samples for work in entry.nodes.values()) or 1
    shares = [round(entry.nodes[name].samples / total, 4) if name in entry.nodes else 0.0 for name in names]
    return CurvePoint(entry.step, entry.mean_loss, rate, shares)


def _column(entry: Entry, names: Sequence[str]) -> StripColumn:
    works = [entry.nodes.get(name, NodeWork()) for name in names]
    parts = [(w.io_seconds, w.compute_seconds, w.update_seconds, w.wait_seconds or 0.0) for w in works]
    last = slowest(entry.nodes)
    return StripColumn(
        entry.step,
        [tuple(round(part / entry.seconds, 3) for part in phases) if entry.seconds else () for phases in parts],
        list(names).index(last) if last else -1,
    )


_MAX_ENTRIES = 400
"""Number of entries that are kept."""
_MIN_ENTRIES = 4
"""Entries before a node's usual speed is known; the first is ignored, since it fills caches."""
_PRESENT_S = 0.75
"""Busy seconds that count as `now`; at least two entries."""
_SLOW_FRACTION = 0.67
"""Fraction of its usual speed below which a node counts as slow."""


class NodeSpeed:
    """Work and busy seconds of one node; waiting does not count."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float]] = deque(maxlen=_MAX_ENTRIES)

    def add(self, work: float, seconds: float) -> None:
        """Add an entry of `work` done in `seconds`; an entry without work is ignored."""
        if work > 0 and seconds > 0:
            self._entries.append((work, seconds))

    @property
    def now(self) -> float:
        """The speed in the last moments; 0 before the node has worked."""
        work = seconds = 0.0
        for count, (more, busy) in enumerate(reversed(self._entries)):
            if count >= 2 and seconds >= _PRESENT_S:
                break
            work, seconds = work + more, seconds + busy
        return work / seconds if seconds else 0.0

    @property
    def usual(self) -> float:
        """The median speed of all entries before the last two; 0 before there are enough."""
        older = len(self._entries) - 2
        if older <= _MIN_ENTRIES:
            return 0.0
        return median(work / seconds for work, seconds in islice(self._entries, 1, older))

    @property
    def slowdown(self) -> float:
        """How many times slower than usual the node is; 1 unless all recent entries are much slower."""
        usual = self.usual
        if usual == 0:
            return 1.0
        last = [work / seconds for work, seconds in islice(reversed(self._entries), 2)]
        is_slow = max(self.now, *last) < _SLOW_FRACTION * usual
        return usual / self.now if is_slow else 1.0
