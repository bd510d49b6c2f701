"""What a step of several ranks takes, from what each one computes by itself and from what their exchanges cost.

Every rank has rehearsed its part of the step alone: it computes, begins an exchange, computes, needs the exchange's
result ... Here all of them play together:

    an exchange starts when the last of its ranks has begun it
    a rank that needs its result goes on when it has started and what the rank's computing has not hidden of it is over
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from evener.errors import InvalidValue, require
from evener.oracle.exchange_timing import ExchangeKind
from evener.schema import Part

Cost: TypeAlias = Callable[[ExchangeKind, tuple[int, ...], int, float], float]
"""Seconds that an exchange of a kind among some ranks still takes, by the bytes of the rank that sends or receives most
and by the seconds for which a rank has computed since it started."""


class Beat(Part, frozen=True, kw_only=True):
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
class Played:
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
class _Rank:
    """Where a rank is in its part."""

    beats: Sequence[Beat]
    position: int = 0
    played: Played = field(default_factory=Played)
    begun: Counter[tuple[int, ...]] = field(default_factory=Counter)
    numbers: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def beat(self) -> Beat | None:
        """The next one; None at the end."""
        return self.beats[self.position] if self.position < len(self.beats) else None


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

    def join(self, beat: Beat, moment: float) -> None:
        """One more rank begins it: as a rank that has no word for all its peers, among neighbours only."""
        self.kind = "neighbours" if "neighbours" in (self.kind, beat.kind) else beat.kind
        self.nbytes, self.start = max(self.nbytes, beat.nbytes), max(self.start, moment)
        self.present += 1


def replay(parts: Sequence[Sequence[Beat]], cost: Cost) -> list[Played]:
    """How every rank spends a step that all of them begin at the same moment.

    Args:
        parts: of every rank, its beats in order.
        cost: of exchanges.

    Raises:
        InvalidValue: the parts do not go together: a rank needs what another one never begins.
    """
    ranks = [_Rank(beats) for beats in parts]
    exchanges: dict[tuple[tuple[int, ...], int], _Exchange] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.beat is not None and _play(rank, rank.beat, exchanges, cost):
                rank.position += 1
                moved = True
    stuck = [index for index, rank in enumerate(ranks) if rank.beat is not None]
    if stuck:
        raise InvalidValue("ranks that wait for ever", stuck, "none: every rank has to begin the same exchanges")
    return [rank.played for rank in ranks]


def _play(
    rank: _Rank,
    beat: Beat,
    exchanges: dict[tuple[tuple[int, ...], int], _Exchange],
    cost: Cost,
) -> bool:
    """Let `rank` go past `beat`; False if what it needs has not started."""
    played = rank.played
    if beat.act == "begin":
        played.computing += beat.computing
        key = rank.numbers[beat.exchange] = (beat.ranks, rank.begun[beat.ranks])
        rank.begun[beat.ranks] += 1
        exchanges.setdefault(key, _Exchange(beat.ranks, beat.kind)).join(beat, played.seconds)
    elif beat.act == "need":
        exchange = exchanges[rank.numbers[beat.exchange]]
        if not exchange.is_complete:
            return False
        played.computing += beat.computing
        early = exchange.start - played.seconds
        played.waiting += max(0.0, early)
        played.exchanging += cost(exchange.kind, exchange.ranks, exchange.nbytes, max(0.0, -early))
    else:
        played.computing += beat.computing
    return True
