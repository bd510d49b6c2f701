"""What exchanges among some ranks were measured to cost, by kind and size; between the sizes it is interpolated."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Literal

from evener.errors import require
from evener.schema import Part

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
