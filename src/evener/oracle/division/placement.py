"""Where a value is, for any shares of the ranks: layouts whose intervals follow once the shares are known.

Decisions about a network do not depend on the ranks' shares; the size of each rank's part does.

    apart       each of consecutive segments in proportion to the shares
    repeated    every index has become several
    stacked     the concatenation of several splits
    section     an interval of one split
    reached     what the windows of a part of the output read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TypeAlias

from evener.oracle.division.layout import (
    PATTERNS,
    Interval,
    Intervals,
    Layout,
    Parts,
    Replica,
    Shape,
    State,
    divide,
    joined,
)
from evener.oracle.division.network import Sliding, WindowRule


@dataclass(frozen=True, slots=True)
class Apart:
    """Every rank has its part of each of consecutive `segments`; axis 0 divides by rows of ranks, 1 by columns."""

    segments: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Repeated:
    """A split in which every index has become `factor` consecutive ones."""

    split: Split
    factor: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """The concatenation of dims of `sizes`, each with its own split."""

    splits: tuple[Split, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The indices from `start` to `stop` of a split dim, counted from `start`."""

    split: Split
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reached:
    """The part of a dim of `size` that the windows of each rank's part of the output reach."""

    split: Split
    window: WindowRule
    size: int


Split: TypeAlias = Apart | Repeated | Stacked | Section | Reached


def repeated(split: Split, factor: int) -> Split:
    """Return `split` with every index repeated `factor` times."""
    return split if factor == 1 else Repeated(split, factor)


def stacked(splits: Sequence[Split], sizes: Sequence[int]) -> Split:
    """Return the split of the concatenation of dims of `sizes`."""
    apart = [split for split in splits if isinstance(split, Apart) and split.axis == 0]
    if len(apart) == len(splits):
        return Apart(tuple(segment for split in apart for segment in split.segments))
    return Stacked(tuple(splits), tuple(sizes))


def section(split: Split, start: int, stop: int) -> Split:
    """Return the split of the indices from `start` to `stop`."""
    if isinstance(split, Apart):
        edges = list(accumulate(split.segments, initial=0))
        if start in edges and stop in edges:
            return Apart(split.segments[edges.index(start) : edges.index(stop)], split.axis)
    return Section(split, start, stop)


def reached(split: Split, window: WindowRule, size: int) -> Split:
    """Return the split of what `window` reaches in an input of `size`; windows of one pixel keep the split."""
    return split if window == Sliding(1, 1, 0) else Reached(split, window, size)


@lru_cache(maxsize=65536)
def parts_of(split: Split, replica: Replica) -> Parts:
    """Return every rank's intervals."""
    if isinstance(split, Apart):
        across = len(replica.columns)
        if split.axis == 0:
            return tuple(part for part in divide(split.segments, replica.shares) for _ in range(across))
        return divide(split.segments, replica.columns) * len(replica.shares)
    if isinstance(split, Stacked):
        starts = accumulate(split.sizes, initial=0)
        shifted = [
            [tuple((a + start, b + start) for a, b in part) for part in parts_of(stacked_split, replica)]
            for stacked_split, start in zip(split.splits, starts, strict=False)
        ]
        return tuple(joined([interval for part in rank for interval in part]) for rank in zip(*shifted, strict=True))
    inner = parts_of(split.split, replica)
    if isinstance(split, Repeated):
        return tuple(tuple((a * split.factor, b * split.factor) for a, b in part) for part in inner)
    if isinstance(split, Section):
        return tuple(_within(part, split.start, split.stop) for part in inner)
    return tuple(_clip(split.window.reach(part[0][0], part[-1][1]), split.size) if part else () for part in inner)


def _within(part: Intervals, start: int, stop: int) -> Intervals:
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in part if max(a, start) < min(b, stop))


def _clip(interval: Interval, size: int) -> Intervals:
    low, high = max(0, interval[0]), min(size, interval[1])
    return ((low, high),) if low < high else ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout whose splits have no numbers yet.

    Attributes:
        state: as in `Layout`.
        splits: of a split value: (dim, how it is split), in order of dims.
    """

    state: State
    splits: tuple[tuple[int, Split], ...] = ()

    def along(self, dim: int) -> Split | None:
        """Return the split of `dim`; None if it is not divided."""
        return next((split for divided, split in self.splits if divided == dim), None)

    @property
    def is_disjoint(self) -> bool:
        """Whether no element of a split value can be on two ranks; windows may overlap."""
        return not any(isinstance(split, Reached) for _, split in self.splits)


ON_ALL, ALIKE_ON_ALL, ADDENDS = Placement("whole"), Placement("alike"), Placement("partial")


def split_along(splits: dict[int, Split]) -> Placement:
    """Return the placement of a value that is divided along the dims of `splits`."""
    return Placement("split", tuple(sorted(splits.items())))


@lru_cache(maxsize=65536)
def layout_of(placement: Placement, replica: Replica) -> Layout:
    """Return the layout of `placement` among the ranks of `replica`."""
    return Layout(placement.state, tuple((dim, parts_of(split, replica)) for dim, split in placement.splits))


def elements_moved(shape: Shape, have: Placement, need: Placement) -> int:
    """Return the elements that all ranks send to move a value and its gradient back, per rank but one.

    The overlap of neighbours' parts is unknown before the shares are; it counts as one element.
    """
    if have == need:
        return 0
    patterns = [pattern for pattern in PATTERNS[have.state, need.state] if pattern is not None]
    if have.state == need.state:
        return 1
    return sum(prod(shape) * (2 if pattern == "reduce" else 1) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A change of a value's placement, for any shares of the ranks."""

    value: int
    have: Placement
    need: Placement
