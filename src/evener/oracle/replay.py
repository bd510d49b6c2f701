"""What a step of several ranks takes, from what each one computes by itself and from what their exchanges cost.

Every rank has rehearsed its part of the step alone: it computes, begins an exchange, computes, needs the exchange's
result ... Here all of them play together:

    an exchange starts when the last of its ranks has begun it
    a rank that needs its result goes on when it has started and what the rank's computing has not hidden of it is over

What exchanges cost was measured among the same ranks, by kind and size; between the sizes it is interpolated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from evener.records.errors import InvalidValue, require
from evener.records.schema import Part

ExchangeKind = Literal["all-reduce", "all-gather", "exchange", "neighbours", "message"]


class ExchangePoint(Part, frozen=True, kw_only=True):
    """Measured seconds of an exchange of one size: the transport, without packing and unpacking.

    Attributes:
        nbytes: of the rank that sends or receives most.
        seconds: from its beginning to its end.
        beside: that it takes longer than what the ranks compute meanwhile, if that is enough to hide all that can be
            hidden; the transport of CPUs is work of the cores that compute.
    """

    nbytes: int
    seconds: float
    beside: float

    def __post_init__(self) -> None:
        require(self.nbytes >= 0, "nbytes", self.nbytes, "zero or more")
        require(self.seconds >= 0, "seconds", self.seconds, "zero seconds or more")
        require(0 <= self.beside <= self.seconds, "beside", self.beside, f"zero to the whole {self.seconds} seconds")


class ExchangeTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one kind of exchange among some ranks.

    Attributes:
        kind: `all-reduce`, `all-gather`, `exchange` (every rank tells all others), `neighbours` (those next to it) or
            `message` (one rank tells one).
        ranks: that take part.
        points: by increasing bytes.
    """

    kind: ExchangeKind
    ranks: int
    points: tuple[ExchangePoint, ...]

    def __post_init__(self) -> None:
        require(self.ranks > 1, "ranks", self.ranks, "at least 2")
        require(bool(self.points), "points", self.points, "at least one")
        sizes = [point.nbytes for point in self.points]
        require(all(a < b for a, b in pairwise(sizes)), "points", sizes, "in order of increasing bytes")

    def seconds(self, nbytes: float, meanwhile: float = 0.0) -> float:
        """That an exchange of so many bytes still takes when the ranks have computed for `meanwhile` since it began."""
        return max(self._between(nbytes, "beside"), self._between(nbytes, "seconds") - meanwhile)

    def _between(self, nbytes: float, field: Literal["seconds", "beside"]) -> float:
        """Interpolated between the measured sizes; above the largest in proportion, below the smallest as that."""
        sizes = [point.nbytes for point in self.points]
        values: list[float] = [getattr(point, field) for point in self.points]
        if nbytes > sizes[-1]:
            return values[-1] * nbytes / sizes[-1]
        after = bisect_left(sizes, nbytes)
        if after == 0:
            return values[0]
        part = (nbytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return values[after - 1] + part * (values[after] - values[after - 1])


Cost: TypeAlias = Callable[[ExchangeKind, tuple[int, ...], int, float], float]
"""Seconds that an exchange of a kind among some ranks still takes, by the bytes of the rank that sends or receives most
and by the seconds for which a rank has computed since it started."""


class TraceEvent(Part, frozen=True, kw_only=True):
    """Something that a rank computes, and what it does next.

    Attributes:
        computing: seconds.
        act: to begin an exchange, to need its result (and wait for it), or to have finished the step.
        exchange: its number on this rank.
        kind: of an exchange that begins.
        ranks: that take part in it.
        nbytes: that this rank sends or receives, whichever is more.
    """

    computing: float
    act: Literal["begin", "need", "finish"] = "finish"
    exchange: int = 0
    kind: ExchangeKind = "exchange"
    ranks: tuple[int, ...] = ()
    nbytes: int = 0

    def __post_init__(self) -> None:
        require(self.computing >= 0, "computing", self.computing, "zero seconds or more")
        require(self.nbytes >= 0, "nbytes", self.nbytes, "zero or more")


@dataclass(kw_only=True)
class RankStep:
    """How one rank spent a step, in seconds.

    Attributes:
        computing: by itself.
        waiting: until the others had begun what it needed.
        exchanging: until exchanges were over that everybody had begun.
    """

    computing: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.computing + self.waiting + self.exchanging


@dataclass
class _RankCursor:
    """Where a rank is in its part."""

    events: Sequence[TraceEvent]
    position: int = 0
    played: RankStep = field(default_factory=RankStep)
    begun: Counter[tuple[int, ...]] = field(default_factory=Counter)
    numbers: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def event(self) -> TraceEvent | None:
        """The next one; None at the end."""
        return self.events[self.position] if self.position < len(self.events) else None


@dataclass
class _Exchange:
    """An exchange for which not all ranks are there yet, or that is under way."""

    ranks: tuple[int, ...]
    kind: ExchangeKind = "exchange"
    nbytes: int = 0
    start: float = 0.0
    present: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all its ranks have begun it."""
        return self.present == len(self.ranks)

    def join(self, event: TraceEvent, moment: float) -> None:
        """One more rank begins it: as a rank that has no word for all its peers, among neighbours only."""
        self.kind = "neighbours" if "neighbours" in (self.kind, event.kind) else event.kind
        self.nbytes, self.start = max(self.nbytes, event.nbytes), max(self.start, moment)
        self.present += 1


def replay(parts: Sequence[Sequence[TraceEvent]], cost: Cost) -> list[RankStep]:
    """How every rank spends a step that all of them begin at the same moment.

    Args:
        parts: of every rank, its events in order.
        cost: of exchanges.

    Raises:
        InvalidValue: the parts do not go together: a rank needs what another one never begins.
    """
    ranks = [_RankCursor(events) for events in parts]
    exchanges: dict[tuple[tuple[int, ...], int], _Exchange] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.event is not None and _play(rank, rank.event, exchanges, cost):
                rank.position += 1
                moved = True
    stuck = [index for index, rank in enumerate(ranks) if rank.event is not None]
    if stuck:
        raise InvalidValue("ranks that wait for ever", stuck, "none: every rank has to begin the same exchanges")
    return [rank.played for rank in ranks]


def _play(
    rank: _RankCursor,
    event: TraceEvent,
    exchanges: dict[tuple[tuple[int, ...], int], _Exchange],
    cost: Cost,
) -> bool:
    """Let `rank` go past `event`; False if what it needs has not started."""
    played = rank.played
    if event.act == "begin":
        played.computing += event.computing
        key = rank.numbers[event.exchange] = (event.ranks, rank.begun[event.ranks])
        rank.begun[event.ranks] += 1
        exchanges.setdefault(key, _Exchange(event.ranks, event.kind)).join(event, played.seconds)
    elif event.act == "need":
        exchange = exchanges[rank.numbers[event.exchange]]
        if not exchange.is_complete:
            return False
        played.computing += event.computing
        early = exchange.start - played.seconds
        played.waiting += max(0.0, early)
        played.exchanging += cost(exchange.kind, exchange.ranks, exchange.nbytes, max(0.0, -early))
    else:
        played.computing += event.computing
    return True
