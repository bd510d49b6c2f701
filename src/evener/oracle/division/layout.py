"""Where a value is: complete on every rank, or divided along some of its dims into intervals; and how that changes.

A rank's part along a dim is a tuple of intervals; the tensor that it holds is their concatenation. Several intervals
come from concatenations: of two values of 8 channels, each in two halves, rank 0 has channels 0-3 and 8-11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, TypeAlias

from evener.oracle.apportion import by_shares
from evener.records.errors import require
from evener.records.schema import Part

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]
Parts: TypeAlias = tuple[Intervals, ...]
"""The intervals of every rank along one dim."""
Region: TypeAlias = tuple[Intervals, ...]
"""The intervals of one rank along every dim."""
Shape: TypeAlias = tuple[int, ...]
State: TypeAlias = Literal["whole", "alike", "partial", "split"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a replica hold a value.

    Attributes:
        state: `split`: every rank has its part. `partial`: every rank has an addend of the sum. `whole`: every rank has
            the complete value and uses it for its own work, so its gradient is the sum of the ranks' gradients.
            `alike`: every rank has the complete value and does the same with it, so each rank has its gradient.
        parts: of a split value: (dim, every rank's intervals), in order of dims.
    """

    state: State
    parts: tuple[tuple[int, Parts], ...] = ()

    def along(self, dim: int) -> Parts | None:
        """Return every rank's intervals along `dim`; None if it is not divided."""
        return next((parts for divided, parts in self.parts if divided == dim), None)

    def region(self, rank: int, shape: Shape) -> Region:
        """Return the region that `rank` has of a value of `shape`."""
        divided = dict(self.parts)
        return tuple(divided[dim][rank] if dim in divided else ((0, size),) for dim, size in enumerate(shape))


WHOLE, ALIKE, PARTIAL = Layout("whole"), Layout("alike"), Layout("partial")


def split(parts: dict[int, Parts]) -> Layout:
    """Return the layout of a value that is divided along the dims of `parts`."""
    return Layout("split", tuple(sorted(parts.items())))


class Replica(Part, frozen=True, kw_only=True):
    """Ranks that hold one model together.

    Attributes:
        shares: share of the work of each rank, as relative speeds in any unit. With columns, of each row of ranks.
        columns: shares of the columns of ranks, where images are divided in both dims.
    """

    shares: tuple[float, ...]
    columns: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, shares in (("shares", self.shares), ("columns", self.columns)):
            allowed = "at least one, zero or more each, not all zero"
            require(bool(shares) and min(shares) >= 0 and sum(shares) > 0, name, shares, allowed)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.shares) * len(self.columns)


@lru_cache(maxsize=65536)
def divide(segments: tuple[int, ...], shares: tuple[float, ...]) -> Parts:
    """Return every rank's intervals of a dim, in proportion to `shares`: an interval of each consecutive segment."""
    parts: list[list[Interval]] = [[] for _ in shares]
    start = 0
    for segment in segments:
        for rank, size in enumerate(by_shares(segment, shares)):
            parts[rank].append((start, start + size))
            start += size
    return tuple(joined(intervals) for intervals in parts)


def is_disjoint(layout: Layout, shape: Shape) -> bool:
    """Return whether no element of a split value is on two ranks."""
    regions = [layout.region(rank, shape) for rank in range(len(layout.parts[0][1]))]
    return not any(common(regions[a], regions[b]) for a in range(len(regions)) for b in range(a))


def length(intervals: Intervals) -> int:
    """Return the number of indices in disjoint `intervals`."""
    return sum(b - a for a, b in intervals)


def common(first: Region, second: Region) -> int:
    """Return the number of elements that two regions have in common."""
    return prod(
        sum(max(0, min(b, d) - max(a, c)) for a, b in left for c, d in right)
        for left, right in zip(first, second, strict=True)
    )


def joined(intervals: Sequence[Interval]) -> Intervals:
    """Return the same indices without empty intervals, and with adjacent intervals merged."""
    merged: list[Interval] = []
    for a, b in intervals:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        elif a < b:
            merged.append((a, b))
    return tuple(merged)


def ring_bytes(nbytes: int, size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `nbytes`: 2 (p-1)/p n."""
    return 2 * (size - 1) * nbytes / size


Pattern: TypeAlias = Literal["spread", "collect", "reduce"]
"""`spread`: owners send their parts to all ranks that need them; `collect`: ranks send addends to the owners, which
sum.
"""

PATTERNS: dict[tuple[State, State], tuple[Pattern | None, Pattern | None]] = {
    ("split", "split"): ("spread", "collect"),
    ("split", "whole"): ("spread", "collect"),
    ("split", "alike"): ("spread", None),
    ("partial", "split"): ("collect", "spread"),
    ("partial", "whole"): ("reduce", "reduce"),
    ("partial", "alike"): ("reduce", None),
    ("alike", "split"): (None, "spread"),
    ("alike", "whole"): (None, "reduce"),
    ("whole", "split"): (None, None),
    ("whole", "alike"): (None, None),
}
"""(forward, backward): the exchange that changes a value's state, and the exchange of its gradient.

from      to        forward          backward
split     split     part -> needed   sum to the owners       a halo, if needed regions overlap; else a re-partition
split     whole     part -> all      sum to the owners       a gather
split     alike     part -> all      the own part
partial   split     sum to owners    part -> all             a reduce-scatter
partial   whole     all-reduce       all-reduce
partial   alike     all-reduce       -
alike     split     the own part     part -> all
alike     whole     -                all-reduce
whole     split     the own part     zeros elsewhere
whole     alike     -                1 / ranks
"""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a value's layout.

    Attributes:
        value: index of the operation that produced the value.
        shape: shape of the value.
        size: number of ranks.
        have: its layout.
        need: the layout that an operation needs.
    """

    value: int
    shape: Shape
    size: int
    have: Layout
    need: Layout

    @property
    def owners(self) -> Layout:
        """The layout that says which rank owns which part in this move's exchange."""
        return self.have if self.have.state == "split" else self.need

    @property
    def needers(self) -> Layout:
        """The layout that says which rank needs which part in this move's exchange."""
        return self.need if self.have.state == "split" else WHOLE

    @property
    def kind(self) -> str:
        """The kind of exchange under which the bytes are counted."""
        if self.have.state == "partial" and self.need.state == "split":
            return "reduce-scatter"
        if "split" not in (self.have.state, self.need.state) or self.have.state == "whole":
            return "all-reduce"
        if self.have.state == self.need.state:
            return "re-partition" if is_disjoint(self.need, self.shape) else "halo"
        return "gather"


def holders(layouts: Sequence[Layout], shape: Shape) -> tuple[Region, ...]:
    """Return the region of each rank of every replica for a weight that all replicas divide along one dim."""
    return tuple(layout.region(rank, shape) for layout in layouts for rank in range(len(layout.parts[0][1])))


def owners(layouts: Sequence[Layout], shape: Shape) -> tuple[Region, ...]:
    """Return the region that each of these ranks sums; a part that several ranks hold is divided evenly among them."""
    dim = layouts[0].parts[0][0]
    held = [region[dim] for region in holders(layouts, shape)]
    edges = sorted({edge for intervals in held for interval in intervals for edge in interval})
    summed: list[list[tuple[int, int]]] = [[] for _ in held]
    for start, end in pairwise(edges):
        ranks = [rank for rank, intervals in enumerate(held) if _has(intervals, start)]
        for rank, parts in zip(ranks, divide((end - start,), (1.0,) * len(ranks)), strict=True):
            summed[rank] += [(start + a, start + b) for a, b in parts]
    everything: Region = tuple(((0, size),) for size in shape)
    return tuple((*everything[:dim], joined(intervals), *everything[dim + 1 :]) for intervals in summed)


def _has(intervals: Intervals, index: int) -> bool:
    return any(a <= index < b for a, b in intervals)
