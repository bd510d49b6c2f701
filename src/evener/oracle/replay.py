"""Predicts a step of several ranks from what each rank computes alone and from what their exchanges cost.

Each rank's part of the step was profiled alone: it computes, begins an exchange, computes, needs the exchange's result
and so on. The replay runs all parts together:

    an exchange starts when the last of its ranks has begun it
    a rank that needs its result continues once the exchange has started and the part not hidden by computing is over

Exchange costs were measured among the same ranks, by kind and size, and are interpolated between sizes.
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
        nbytes: bytes of the rank that sends or receives most.
        seconds: seconds from its beginning to its end.
        beside: additional seconds if the ranks compute long enough meanwhile to hide all that can be hidden. It is not
            zero where the transport uses the cores that compute.
    """

    nbytes: int
    seconds: float
    beside: float

    def __post_init__(self) -> None:
        require(self.nbytes >= 0, "nbytes", self.nbytes, "zero or more")
        require(self.seconds >= 0, "seconds", self.seconds, "zero seconds or more")
        require(0 <= self.beside <= self.seconds, "beside", self.beside, f"zero to {self.seconds} seconds")


class ExchangeTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one kind of exchange among some ranks.

    Attributes:
        kind: `all-reduce`, `all-gather`, `exchange` (every rank sends to all others), `neighbours` (each rank sends to
            adjacent ranks) or `message` (one rank sends to one).
        ranks: number of ranks that take part.
        points: measurements by increasing bytes.
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
        """Return the remaining seconds of an exchange of `nbytes` after the ranks have computed `meanwhile` seconds."""
        return max(self._between(nbytes, "beside"), self._between(nbytes, "seconds") - meanwhile)

    def _between(self, nbytes: float, field: Literal["seconds", "beside"]) -> float:
        """Interpolate between measured sizes; scale above the largest, and use the smallest below it."""
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
"""A function of kind, ranks, bytes of the rank that sends or receives most, and seconds that a rank has computed since
the exchange started; it returns the remaining seconds of the exchange.
"""


class TraceEvent(Part, frozen=True, kw_only=True):
    """A piece of a rank's computing, and the action that follows it.

    Attributes:
        computing: seconds.
        act: begin an exchange, need its result (and wait for it), or finish the step.
        exchange: number of the exchange on this rank.
        kind: kind of an exchange that begins.
        ranks: ranks that take part in it.
        nbytes: bytes that this rank sends or receives, whichever is more.
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
        computing: computing alone.
        waiting: waiting until the other ranks had begun the exchanges that it needed.
        exchanging: waiting for exchanges that all ranks had begun.
    """

    computing: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.computing + self.waiting + self.exchanging


@dataclass
class _RankCursor:
    """The position of a rank in its part."""

    events: Sequence[TraceEvent]
    position: int = 0
    played: RankStep = field(default_factory=RankStep)
    begun: Counter[tuple[int, ...]] = field(default_factory=Counter)
    numbers: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def event(self) -> TraceEvent | None:
        """The next event; None at the end."""
        return self.events[self.position] if self.position < len(self.events) else None


@dataclass
class _Exchange:
    """An exchange that waits for some of its ranks, or that is under way."""

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
        """Let one more rank begin the exchange; it is of kind neighbours if any rank sends to its neighbours only."""
        self.kind = "neighbours" if "neighbours" in (self.kind, event.kind) else event.kind
        self.nbytes, self.start = max(self.nbytes, event.nbytes), max(self.start, moment)
        self.present += 1


def replay(parts: Sequence[Sequence[TraceEvent]], cost: Cost) -> list[RankStep]:
    """Return how each rank spends a step that all ranks begin at the same moment.

    Args:
        parts: the events of each rank, in order.
        cost: cost of exchanges.

    Raises:
        InvalidValue: the parts do not match: a rank needs an exchange that another rank never begins.
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
        raise InvalidValue("ranks that would wait for ever", stuck, "none: every rank must begin the same exchanges")
    return [rank.played for rank in ranks]


def _play(
    rank: _RankCursor,
    event: TraceEvent,
    exchanges: dict[tuple[tuple[int, ...], int], _Exchange],
    cost: Cost,
) -> bool:
    """Advance `rank` past `event`; return False if the exchange that it needs has not started."""
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
