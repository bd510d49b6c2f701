"""The history of a run, step by step and node by node, in bounded memory, from which its record is made.

There may be thousands of steps per second, so an entry is a few plain numbers. When there are too many entries,
neighbours are summed, twice as many each time; shown steps are summed over a fraction of a second. When there are too
many validations or epochs, every second one is dropped, but for the best and the last. So Evener can read the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import msgspec

from evener.records.plan import Plan
from evener.records.record import Epoch, Event, NodeStep, NodeSummary, Step, TrainRecord, Validation
from evener.records.schema import measured, quantity, summable

_CAPACITY = 4096
_MAX_NODE_STEPS = 2**18
"""Limit of entries times nodes, which take some 370 bytes each in a record."""
_MAX_METRICS = 2**18
"""Limit of the values in all validations."""


@dataclass(slots=True)
class NodeWork:
    """The work of one node in an entry.

    Attributes:
        compute_seconds: FB.
        sent: bytes of its contributions, or handed to collectives.
        received: bytes of weights that it received.
        saved: bytes that compression saved, of both.
        wait_seconds: GE; None if it waited whenever it did not compute.
        cpu_seconds: CPU time of its process; 0 where that is not known.
        memory: peak memory in bytes; 0 where that is not known.
    """

    samples: int = 0
    compute_seconds: float = 0.0
    sent: int = 0
    received: int = 0
    saved: int = 0
    io_seconds: float = 0.0
    update_seconds: float = 0.0
    wait_seconds: float | None = None
    cpu_seconds: float = 0.0
    memory: int = 0

    def add(self, other: NodeWork) -> None:
        """Add the work of `other`."""
        self.samples += other.samples
        self.compute_seconds += other.compute_seconds
        self.sent += other.sent
        self.received += other.received
        self.saved += other.saved
        self.io_seconds += other.io_seconds
        self.update_seconds += other.update_seconds
        self.cpu_seconds += other.cpu_seconds
        self.memory = max(self.memory, other.memory)
        if other.wait_seconds is not None:
            self.wait_seconds = (self.wait_seconds or 0.0) + other.wait_seconds

    @classmethod
    def of(cls, node: NodeStep) -> NodeWork:
        """Return the work in a node's part of a step."""
        return cls(
            samples=node.samples,
            compute_seconds=node.compute_seconds,
            sent=node.sent_bytes,
            io_seconds=node.io_seconds,
            update_seconds=node.update_seconds,
            wait_seconds=node.wait_seconds,
            cpu_seconds=node.cpu_seconds,
            memory=node.memory_bytes,
        )

    @property
    def busy_seconds(self) -> float:
        """Seconds of IO, FB and WU."""
        return self.io_seconds + self.compute_seconds + self.update_seconds

    def step(self, seconds: float) -> NodeStep:
        """Return the node's part of a step, for an entry of so many seconds."""
        waited = max(0.0, seconds - self.compute_seconds) if self.wait_seconds is None else self.wait_seconds
        return NodeStep(
            samples=quantity(self.samples),
            io_seconds=measured(self.io_seconds),
            compute_seconds=measured(self.compute_seconds),
            wait_seconds=measured(waited),
            update_seconds=measured(self.update_seconds),
            sent_bytes=quantity(self.sent),
            cpu_seconds=measured(self.cpu_seconds),
            memory_bytes=quantity(self.memory),
        )


@dataclass(slots=True)
class Entry:
    """Some neighbouring steps, summed.

    Attributes:
        step: number of the last step, from 1.
        epoch: epoch of that step, from 0.
        loss: sum over the samples.
        seconds: seconds of all `steps`.
        staleness: sum over all `contributions`.
        nodes: work by node.
        num_unknown: samples whose loss is not known.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    contributions: int = 0
    staleness: float = 0
    nodes: dict[str, NodeWork] = field(default_factory=dict)
    num_unknown: int = 0

    @classmethod
    def of(cls, step: Step, names: Sequence[str]) -> Entry:
        """Return an entry for `step`, whose columns have these names."""
        return cls(
            step=step.step,
            epoch=step.epoch,
            samples=step.samples,
            loss=0.0 if step.loss is None else step.loss * step.samples,
            seconds=step.seconds,
            steps=1,
            contributions=1,
            staleness=step.staleness,
            nodes={name: NodeWork.of(node) for name, node in zip(names, step.nodes, strict=True)},
            num_unknown=step.samples if step.loss is None else 0,
        )

    @property
    def mean_loss(self) -> float | None:
        """Mean over the samples whose loss is known; None if it is known for none of them."""
        num_known = self.samples - self.num_unknown
        return self.loss / num_known if num_known else None if self.samples else 0.0

    def add(self, other: Entry) -> None:
        """Add the later steps of `other`."""
        self.step, self.epoch = other.step, other.epoch
        self.samples += other.samples
        self.loss += other.loss
        self.seconds += other.seconds
        self.steps += other.steps
        self.contributions += other.contributions
        self.staleness += other.staleness
        self.num_unknown += other.num_unknown
        for name, work in other.nodes.items():
            total = self.nodes.get(name)
            if total is None:
                total = self.nodes[name] = NodeWork()
            total.add(work)

    def as_step(self, names: Sequence[str]) -> Step:
        """Return the entry as a step of a record, with a column for each of `names`."""
        return Step(
            step=self.step,
            epoch=self.epoch,
            samples=quantity(self.samples),
            loss=None if (loss := self.mean_loss) is None else summable(loss),
            seconds=measured(self.seconds),
            nodes=tuple(self.nodes.get(name, NodeWork()).step(self.seconds) for name in names),
            staleness=self.staleness / self.contributions if self.contributions else 0.0,
        )


def fraction_of_ideal(entries: Iterable[Entry], plan: Plan) -> float | None:
    """Return samples per second, as a fraction of the nodes' speed together if none waits.

    Where nodes divide samples, the ideal is the sum over nodes of samples / busy seconds: loading, computing, updating.
    A node counts for the steps in which it worked. Where nodes divide a model, it is the busy part of all nodes' time.

    Returns:
        In [0, 1]; None if fewer than two nodes worked, since a single one never waits.
    """
    total = Entry()
    present: dict[str, float] = {}
    for entry in entries:
        total.add(entry)
        for name, work in entry.nodes.items():
            if work.busy_seconds > 0:
                present[name] = present.get(name, 0.0) + entry.seconds
    if len(present) < 2 or not total.seconds:
        return None
    if any(one.replica is not None for one in plan.assignments):
        return min(1.0, sum(total.nodes[name].busy_seconds for name in present) / sum(present.values()))
    works = ((total.nodes[name], seconds) for name, seconds in present.items())
    ideal = sum(work.samples / work.busy_seconds * seconds for work, seconds in works)
    return min(1.0, total.samples / ideal) if ideal else None


class History(msgspec.Struct, kw_only=True):
    """The history of one run, which can be saved and continued.

    Attributes:
        totals: work of every node that ever took part in the run, by name, in the order in which they joined.
        since: `seconds` when each of them joined.
        epochs: ended epochs at a master, in order; see `add_epoch`.
        every: number of steps in one entry.
        entries: entries of so many steps each.
        open: entry that is not yet full.
        unread: steps that `news` has not returned yet.
        seconds: seconds of all steps, without validation.
        loss: loss of the last step whose loss is known.
        epoch: epoch of the last step.
        lost_seconds: seconds of work that does not count, because nodes were lost or joined.
        wall_seconds: seconds of the whole loop, including validation and checkpoints, where one process has it.
        keeps_news: whether `news` is used.
    """

    totals: dict[str, NodeWork] = {}
    since: dict[str, float] = {}
    events: list[Event] = []
    validations: list[Validation] = []
    epochs: list[Epoch] = []
    every: int = 1
    entries: list[Entry] = []
    open: Entry = msgspec.field(default_factory=Entry)
    unread: Entry = msgspec.field(default_factory=Entry)
    seconds: float = 0.0
    loss: float = 0.0
    epoch: int = 0
    lost_seconds: float = 0.0
    wall_seconds: float = 0.0
    keeps_news: bool = True

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 before the first."""
        return self.open.step or (self.entries[-1].step if self.entries else 0)

    @property
    def goodput(self) -> float:
        """Share of the loop's seconds with work that counts, validation or checkpoints."""
        return 1 - min(1.0, self.lost_seconds / self.wall_seconds) if self.wall_seconds else 1.0

    @property
    def names(self) -> list[str]:
        """Names of all nodes that ever took part in the run, in the order in which they joined."""
        return list(self.totals)

    def add_node(self, name: str) -> None:
        """Add a column for the node `name`."""
        if name not in self.totals:
            self.totals[name] = NodeWork()
            self.since[name] = self.seconds
            self._limit()

    def add(self, entry: Entry) -> None:
        """Append one step, or several."""
        self.epoch = entry.epoch
        self.seconds += entry.seconds
        for name, work in entry.nodes.items():
            self.totals[name].add(work)
        if self.keeps_news:
            self.unread.add(entry)
        if self.open.steps or entry.steps < self.every:
            self.open.add(entry)
            entry = self.open
        if entry.steps >= self.every:
            self.entries.append(entry)
            self.open = Entry()
            if len(self.entries) >= _CAPACITY or len(self.entries) * len(self.totals) >= _MAX_NODE_STEPS:
                self._limit()

    def add_validation(self, validation: Validation) -> bool:
        """Append a validation; return whether earlier ones were dropped, since there were too many."""
        self.validations.append(validation)
        is_full = len(self.validations) >= min(_CAPACITY, _MAX_METRICS // (1 + len(validation.metrics)))
        if is_full:
            best = min(self.validations, key=lambda one: (-(one.accuracy or 0.0), one.loss))
            self.validations = _every_second(self.validations, best)
        return is_full

    def add_epoch(self, epoch: Epoch) -> None:
        """Append the end of an epoch; drop earlier ones if there are too many."""
        self.epochs.append(epoch)
        if len(self.epochs) >= _CAPACITY:
            best = min(self.epochs, key=lambda one: inf if one.loss is None else one.loss)
            self.epochs = _every_second(self.epochs, best)

    def news(self, num_columns: int) -> Step | None:
        """Return the steps since the last call as one step with the first nodes' columns; None if there are none."""
        entry, self.unread = self.unread, Entry()
        return entry.as_step(self.names[:num_columns]) if entry.steps else None

    def steps(self) -> tuple[Step, ...]:
        """Return all steps; the last entry may have fewer steps."""
        names = self.names
        return tuple(entry.as_step(names) for entry in self._all())

    def last_loss(self) -> float | None:
        """Return the mean loss over the samples of the last epoch that was begun; None if there was no step."""
        entries = self._all()
        return self.loss_of(entries[-1].epoch) if entries else None

    def loss_of(self, epoch: int) -> float | None:
        """Return the mean loss over the samples of an epoch; None if it has no step."""
        last = [entry for entry in self._all() if entry.epoch == epoch]
        samples = sum(entry.samples - entry.num_unknown for entry in last)
        return sum(entry.loss for entry in last) / samples if samples else None

    def record(self, nodes: Sequence[NodeSummary], *, plan: Plan, **fields: Any) -> TrainRecord:
        """Return the record of the run; `nodes`, `plan` and `fields` have the data that a history lacks."""
        samples = sum(entry.samples for entry in self._all())
        return TrainRecord(
            plan=plan,
            samples_per_second=samples / self.seconds if self.seconds else 0.0,
            final_loss=self.last_loss(),
            validation_accuracy=self.validations[-1].accuracy if self.validations else None,
            every=self.every,
            steps=self.steps(),
            validations=tuple(self.validations),
            events=tuple(self.events),
            nodes=tuple(nodes),
            goodput=self.goodput,
            of_ideal=fraction_of_ideal(self._all(), plan),
            bytes_saved=sum(work.saved for work in self.totals.values()),
            **fields,
        )

    def _all(self) -> list[Entry]:
        return [*self.entries, *([self.open] if self.open.steps else [])]

    def _limit(self) -> None:
        """Sum neighbours until the entries are few enough for their nodes."""
        while len(self.entries) >= max(2, min(_CAPACITY, _MAX_NODE_STEPS // max(1, len(self.totals)))):
            self._halve()

    def _halve(self) -> None:
        rest = self.entries[-1:] if len(self.entries) % 2 else []  # nodes have joined: it becomes half an entry
        if rest:
            self.open = _sum_of([*rest, *([self.open] if self.open.steps else [])])
        self.entries = [_sum_of(pair) for pair in zip(self.entries[::2], self.entries[1::2], strict=False)]
        self.every *= 2


def _sum_of(entries: Iterable[Entry]) -> Entry:
    total = Entry()
    for entry in entries:
        total.add(entry)
    return total


T = TypeVar("T")


def _every_second(items: Sequence[T], best: T) -> list[T]:
    """Return every second item, the `best` and the last."""
    return [one for number, one in enumerate(items) if number % 2 == 0 or one is best or one is items[-1]]
