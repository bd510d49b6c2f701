"""What happened in a run, update by update and node by node, in bounded memory: what its record is made of.

Updates come by the thousand a second: an entry here is a few plain numbers. When there are too many, neighbours are
summed, twice as many each time; what a command is shown while the run goes on is summed over a fraction of a second.
"""

from __future__ import annotations

from evener.ps.entry import Entry, Work
from evener.record import Event, Step, Validation
from evener.schema import Part
from evener.sync.messages import Update

_CAPACITY = 4096


class LedgerState(Part, frozen=True, kw_only=True):
    """All of a ledger, to be written down."""

    every: int
    names: list[str]
    entries: list[Entry]
    open: Entry
    totals: dict[str, Work]
    since: dict[str, float]
    loss: float
    seconds: float
    events: list[Event]
    validations: list[Validation]


class Ledger:
    """The history of one run.

    Attributes:
        names: of all nodes that ever had a part in it, in the order in which they came.
        totals: what each of them did.
        since: `seconds` when each of them came.
        events: in order.
        validations: in order.
        every: updates that one entry sums.
        seconds: of all updates, without validation.
        loss: of the last update whose loss is known.
        epoch: of the last update.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        self.names: list[str] = list(state.names) if state else []
        self.totals: dict[str, Work] = dict(state.totals) if state else {}
        self.since: dict[str, float] = dict(state.since) if state else {}
        self.events: list[Event] = list(state.events) if state else []
        self.validations: list[Validation] = list(state.validations) if state else []
        self.every = state.every if state else 1
        self.seconds = state.seconds if state else 0.0
        self.loss = state.loss if state else 0.0
        self.epoch = state.open.epoch if state else 0
        self._entries: list[Entry] = list(state.entries) if state else []
        self._open = state.open if state else Entry()
        self._news = Entry()
        self._pending: dict[str, Work] = {}

    def know(self, name: str) -> bool:
        """Have a column for node `name`; whether it is a new one."""
        if name in self.totals:
            return False
        self.names.append(name)
        self.totals[name] = Work()
        self.since[name] = self.seconds
        return True

    def contributed(self, name: str, work: Work) -> None:
        """Note what `name` did; it counts when it goes into the weights."""
        self._pending.setdefault(name, Work()).add(work)

    def refused(self, name: str) -> None:
        """What `name` did last does not go into the weights."""
        self._pending.pop(name, None)

    def sent(self, name: str, num_bytes: int, saved: int) -> None:
        """Note that `name` is sent weights, in so many bytes, which are `saved` fewer than they might be."""
        if name in self.totals:
            self.totals[name].add(Work(received=num_bytes, saved=saved))

    def updated(self, update: Update, seconds: float) -> None:
        """Note an update that came `seconds` after the one before."""
        self.epoch = update.epoch
        if update.loss is not None:
            self.loss = update.loss
        entry = Entry(
            update.version,
            update.epoch,
            update.num_samples,
            self.loss * update.num_samples,
            seconds,
            1,
            len(update.staleness),
            sum(update.staleness.values()),
        )
        for name in update.staleness:
            work = self._pending.pop(name, None)
            if work is not None:
                entry.nodes[name] = work
                self.totals[name].add(work)
        self.seconds += seconds
        self._news.add(entry)
        self._append(entry)

    def news(self, num_columns: int) -> Step | None:
        """What happened since this was last asked, as one step with the first nodes' columns; None if nothing did."""
        entry, self._news = self._news, Entry()
        return entry.step(self.names[:num_columns]) if entry.updates else None

    def steps(self) -> tuple[Step, ...]:
        """The whole history."""
        last = [self._open] if self._open.updates else []
        return tuple(entry.step(self.names) for entry in [*self._entries, *last])

    def last_loss(self) -> float | None:
        """Mean over the samples of the last epoch that was begun; None if there was no update."""
        entries = [*self._entries, *([self._open] if self._open.updates else [])]
        last = [entry for entry in entries if entry.epoch == entries[-1].epoch]
        samples = sum(entry.samples for entry in last)
        return sum(entry.loss for entry in last) / samples if samples else None

    def state(self) -> LedgerState:
        """All of it, to be written down."""
        return LedgerState(
            every=self.every,
            names=self.names,
            entries=self._entries,
            open=self._open,
            totals=self.totals,
            since=self.since,
            loss=self.loss,
            seconds=self.seconds,
            events=self.events,
            validations=self.validations,
        )

    def _append(self, entry: Entry) -> None:
        self._open.add(entry)
        if self._open.updates < self.every:
            return
        self._entries.append(self._open)
        self._open = Entry()
        if len(self._entries) >= _CAPACITY:
            self._halve()

    def _halve(self) -> None:
        for first, second in zip(self._entries[::2], self._entries[1::2], strict=True):
            first.add(second)
        del self._entries[1::2]
        self.every *= 2
