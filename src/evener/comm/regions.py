"""Which part of a tensor a rank has, and which stretches of it another rank needs: arithmetic of intervals, no torch.

A region is a product of intervals, some for every dim. The tensor that a rank holds is the concatenation of its
intervals along each dim: the region ((0, 4),), ((2, 5), (8, 9)) of a matrix is a tensor of shape (4, 4) whose last
column is column 8 of the whole.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]
Region: TypeAlias = tuple[Intervals, ...]
Place: TypeAlias = tuple[slice, ...]
"""Where in a rank's own tensor something lies: a slice for every dim."""


def size_of(intervals: Intervals) -> int:
    """Number of indices in disjoint `intervals`."""
    return sum(end - start for start, end in intervals)


def shape_of(region: Region) -> tuple[int, ...]:
    """Shape of the tensor that holds `region`."""
    return tuple(size_of(intervals) for intervals in region)


def blocks(own: Region, need: Region) -> list[tuple[Place, Place]]:
    """What `own` has of `need`, as blocks: (place in the tensor of `own`, place in the tensor of `need`)."""
    stretches = [_stretches(a, b) for a, b in zip(own, need, strict=True)]
    return [(tuple(s[0] for s in block), tuple(s[1] for s in block)) for block in product(*stretches)]


def numel(place: Place) -> int:
    """Number of elements at `place`."""
    return prod(part.stop - part.start for part in place)


def _stretches(own: Intervals, need: Intervals) -> list[tuple[slice, slice]]:
    """What `own` has of `need` along one dim, each counted from the begin of its own tensor."""
    found = []
    before_own = 0
    for start, end in own:
        before_need = 0
        for first, last in need:
            low, high = max(start, first), min(end, last)
            if low < high:
                here, there = before_own - start, before_need - first
                found.append((slice(low + here, high + here), slice(low + there, high + there)))
            before_need += last - first
        before_own += end - start
    return found
