"""What happened in a run, step by step and node by node, in bounded memory: what its record is made of.

Steps come by the thousand a second: an entry here is a few plain numbers. When there are too many, neighbours are
summed, twice as many each time; what is shown while the run goes on is summed over a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evener.records.plan import Plan
from evener.records.record import Epoch, Event, NodeStep, NodeSummary, Step, TrainRecord, Validation

_CAPACITY = 4096


@dataclass(slots=True)
class NodeWork:
    """What one node did in an entry.

    Attributes:
        compute_seconds: FB.
        sent: bytes of its contributions, or handed to collectives.
        received: bytes of weights that it was sent.
        saved: bytes that compression saved, of both.
        wait_seconds: GE; None where whatever it did not compute it waited.
        cpu_seconds: CPU time of its process; 0 where that is not known.
        memory: bytes at its peak until then; likewise.
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
        """Count what `other` did as well."""
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
        """What a part of a step tells."""
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
        """IO, FB and WU."""
        return self.io_seconds + self.compute_seconds + self.update_seconds

    def step(self, seconds: float) -> NodeStep:
        """As a part of a record, of an entry of so many seconds."""
        waited = max(0.0, seconds - self.compute_seconds) if self.wait_seconds is None else self.wait_seconds
        return NodeStep(
            samples=self.samples,
            io_seconds=self.io_seconds,
            compute_seconds=self.compute_seconds,
            wait_seconds=waited,
            update_seconds=self.update_seconds,
            sent_bytes=self.sent,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory,
        )


@dataclass(slots=True)
class Entry:
    """Some neighbouring steps, summed.

    Attributes:
        step: the last one, from 1.
        epoch: of that, from 0.
        loss: summed over the samples.
        seconds: of all `steps`.
        staleness: of all `contributions` together.
        nodes: what each did, by name.
        untold: samples whose loss is not known.
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
    untold: int = 0

    @classmethod
    def of(cls, step: Step, names: Sequence[str]) -> Entry:
        """What `step` tells, whose columns have these names."""
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
            untold=step.samples if step.loss is None else 0,
        )

    @property
    def mean_loss(self) -> float | None:
        """Over the samples whose loss is known; None if there are some, and none of them is."""
        told = self.samples - self.untold
        return self.loss / told if told else None if self.samples else 0.0

    def add(self, other: Entry) -> None:
        """Count the later steps in `other` as well."""
        self.step, self.epoch = other.step, other.epoch
        self.samples += other.samples
        self.loss += other.loss
        self.seconds += other.seconds
        self.steps += other.steps
        self.contributions += other.contributions
        self.staleness += other.staleness
        self.untold += other.untold
        for name, work in other.nodes.items():
            own = self.nodes.get(name)
            if own is None:
                own = self.nodes[name] = NodeWork()
            own.add(work)

    def as_step(self, names: Sequence[str]) -> Step:
        """As a part of a record, with a column for each of `names`."""
        return Step(
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            loss=self.mean_loss,
            seconds=self.seconds,
            nodes=tuple(self.nodes.get(name, NodeWork()).step(self.seconds) for name in names),
            staleness=self.staleness / self.contributions if self.contributions else 0.0,
        )


def fraction_of_ideal(entries: Iterable[Entry], plan: Plan) -> float | None:
    """Samples per second, as a fraction of what the nodes do together when none waits.

    Where nodes divide samples, the ideal is the sum over nodes of samples / busy seconds: loading, computing, updating.
    A node counts for the steps in which it worked. Where nodes divide a model, it is the busy part of all nodes' time.

    Returns:
        In [0, 1]; None if fewer than two nodes worked, for a single one waits for nobody.
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
    """The history of one run; encoded as it is, it can be written down, and goes on where it was.

    Attributes:
        totals: what every node did that ever had a part in the run, by name, in the order in which they came.
        since: `seconds` when each of them came.
        epochs: that have ended at a master, in their order.
        every: steps that one entry sums.
        entries: of so many steps each.
        open: the entry that is not yet full.
        unread: what `news` has not given yet.
        seconds: of all steps, without validation.
        loss: of the last step whose loss is known.
        epoch: of the last step.
        lost_seconds: in which nothing was computed that counts, as nodes were lost or came.
        wall_seconds: of the whole loop, validation and checkpoints included, where one process has it.
        keeps_news: whether anybody asks for `news`.
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
        """The last one that is in it; 0 before the first."""
        return self.open.step or (self.entries[-1].step if self.entries else 0)

    @property
    def goodput(self) -> float:
        """Share of the loop's seconds in which work was done that counts, or validation or a checkpoint."""
        return 1 - min(1.0, self.lost_seconds / self.wall_seconds) if self.wall_seconds else 1.0

    @property
    def names(self) -> list[str]:
        """Of all nodes that ever had a part in it, in the order in which they came."""
        return list(self.totals)

    def add_node(self, name: str) -> None:
        """Have a column for node `name`."""
        if name not in self.totals:
            self.totals[name] = NodeWork()
            self.since[name] = self.seconds

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
            if len(self.entries) >= _CAPACITY:
                self._halve()

    def news(self, num_columns: int) -> Step | None:
        """What happened since this was last asked, as one step with the first nodes' columns; None if nothing did."""
        entry, self.unread = self.unread, Entry()
        return entry.as_step(self.names[:num_columns]) if entry.steps else None

    def steps(self) -> tuple[Step, ...]:
        """The whole history, the last entry perhaps of fewer steps."""
        names = self.names
        return tuple(entry.as_step(names) for entry in self._all())

    def last_loss(self) -> float | None:
        """Mean over the samples of the last epoch that was begun; None if there was no step."""
        entries = self._all()
        return self.loss_of(entries[-1].epoch) if entries else None

    def loss_of(self, epoch: int) -> float | None:
        """Mean over the samples of an epoch; None if there was no step of it."""
        last = [entry for entry in self._all() if entry.epoch == epoch]
        samples = sum(entry.samples - entry.untold for entry in last)
        return sum(entry.loss for entry in last) / samples if samples else None

    def record(self, nodes: Sequence[NodeSummary], *, plan: Plan, **fields: Any) -> TrainRecord:
        """The record of the run; `nodes`, `plan` and `fields` hold what is not in a history."""
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

    def _halve(self) -> None:
        both: list[Entry] = []
        for first, second in zip(self.entries[::2], self.entries[1::2], strict=True):
            both.append(Entry())
            both[-1].add(first)
            both[-1].add(second)
        self.entries = both
        self.every *= 2
