"""Which part of its weights a rank has, which follows from how the operation is done; and who sums their gradients.

split   a part: its gradient is complete within the replica
whole   all: the ranks' gradients are addends
alike   all: every rank of the replica has the gradient

Of a gradient that several replicas have, each divided in its own way, every rank sums a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evener.oracle.division.layout import Intervals, Layout, Region, Shape, divide, joined
from evener.oracle.division.network import Operation, Weight
from evener.oracle.division.placement import ALIKE_ON_ALL, ON_ALL, Placement, Split, split_along
from evener.oracle.division.rules import Choice


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight of a divided model.

    Attributes:
        name: in the model's state dict.
        shape: of the whole.
        layout: how the ranks of a replica hold it.
        trainable: whether it has a gradient.
    """

    name: str
    shape: Shape
    layout: Layout
    trainable: bool


def weight_placements(operation: Operation, choice: Choice) -> tuple[Placement, ...]:
    """The placement of every weight of `operation`, in order."""
    return tuple(_placement(operation, choice, weight) for weight in operation.weights)


def _placement(operation: Operation, choice: Choice, weight: Weight) -> Placement:
    parts = _kernel(operation, choice) if weight.role == "kernel" else _vector(choice)
    if parts and weight.role != "free":
        return split_along(parts)
    alike = choice.gives == ALIKE_ON_ALL and choice.mode == ""
    return ALIKE_ON_ALL if alike else ON_ALL


def _kernel(operation: Operation, choice: Choice) -> dict[int, Split]:
    reads, gives = _channels(choice.needs[0]), _channels(choice.gives)
    channel_dim = 1 - operation.filter_dim
    if choice.mode == "channel":
        return {channel_dim: reads} if reads else {}
    if choice.mode == "filter" and gives:
        grouped_by_channel = operation.groups > 1 and operation.filter_dim == 1
        return {0: reads} if grouped_by_channel and reads else {operation.filter_dim: gives}
    return {}


def _vector(choice: Choice) -> dict[int, Split]:
    parts = _channels(choice.adds if choice.mode == "channel" else choice.gives)
    return {0: parts} if parts else {}


def _channels(placement: Placement | None) -> Split | None:
    return placement.along(1) if placement is not None else None


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
