"""Who sums which part of a gradient that several replicas have, each divided in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from evener.oracle.division.layout import Intervals, Layout, Region, Shape, divide, joined


def holders(layouts: Sequence[Layout], shape: Shape) -> tuple[Region, ...]:
    """What every rank of every replica, in order, has of a weight of `shape` that all replicas divide along one dim."""
    return tuple(layout.region(rank, shape) for layout in layouts for rank in range(len(layout.parts[0][1])))


def owners(layouts: Sequence[Layout], shape: Shape) -> tuple[Region, ...]:
    """Which part of the weight each of these ranks sums: what several have is divided evenly among them."""
    dim = layouts[0].parts[0][0]
    held = [region[dim] for region in holders(layouts, shape)]
    edges = sorted({edge for intervals in held for interval in intervals for edge in interval})
    own: list[list[tuple[int, int]]] = [[] for _ in held]
    for start, end in pairwise(edges):
        ranks = [rank for rank, intervals in enumerate(held) if _has(intervals, start)]
        for rank, parts in zip(ranks, divide((end - start,), (1.0,) * len(ranks)), strict=True):
            own[rank] += [(start + a, start + b) for a, b in parts]
    whole: Region = tuple(((0, size),) for size in shape)
    return tuple((*whole[:dim], joined(intervals), *whole[dim + 1 :]) for intervals in own)


def _has(intervals: Intervals, index: int) -> bool:
    return any(a <= index < b for a, b in intervals)
