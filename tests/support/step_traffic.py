"""Bytes that every rank sends and receives in one training step of an arranged run, by kind; as `comm` counts them.

Exchanges are counted block by block, all-reduces as rings: 2 (p-1)/p of their bytes each way. Ranks that normalise
together gather mean, variance and count, and in backward two sums, of every channel (BatchNorm) or of every sample's
every group (GroupNorm).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias

from evener.oracle.division.layout import (
    PATTERNS,
    Layout,
    Move,
    Region,
    Shape,
    common,
    divide,
    holders,
    owners,
    ring_bytes,
)
from evener.oracle.division.plan import Arrangement, ReplicaPlan

Flow: TypeAlias = tuple[str, float, float]
"""(kind, sent, received), in elements."""
_STATISTICS, _BACKWARD_SUMS = 3, 2


def step_traffic(
    plans: Sequence[ReplicaPlan], arrangement: Arrangement, element_bytes: int, *, inputs_need_gradients: bool = False
) -> list[dict[str, tuple[float, float]]]:
    """By rank and kind, the bytes (sent, received) of one forward and backward pass and the sums of gradients.

    Args:
        plans: of every replica, for the shape of its own batch.
        arrangement: of all ranks.
        element_bytes: of a number; statistics are of 4 bytes at least.
        inputs_need_gradients: whether the inputs of the network have gradients.
    """
    traffic = []
    for index, plan in enumerate(plans):
        trained = _trained(plan, inputs_need_gradients)
        for rank in range(plan.size):
            flows = [*_moved(plan, rank, trained), *_normalised(plans, arrangement, index, rank, trained)]
            flows += _summed(plans, arrangement, index, rank)
            traffic.append(_bytes_by_kind(flows, element_bytes))
    return traffic


def _trained(plan: ReplicaPlan, inputs: bool) -> list[bool]:
    """Of every operation, whether its output has a gradient."""
    trained: list[bool] = []
    for operation in plan.network.operations:
        own = any(weight.trainable for weight in operation.weights) or (operation.kind == "input" and inputs)
        trained.append(own or any(trained[i] for i in operation.inputs))
    return trained


def _moved(plan: ReplicaPlan, rank: int, trained: Sequence[bool]) -> Iterator[Flow]:
    """What the plan's moves and halos take."""
    for step in plan.steps:
        for move in (*step.moves, *([step.halo] if step.halo else [])):
            yield (move.kind, *elements(move, rank))
            if trained[move.value]:
                yield (move.kind, *elements(move, rank, backward=True))


def elements(move: Move, rank: int, backward: bool = False) -> tuple[float, float]:
    """(sent, received) by `rank`, in one direction of a pass."""
    pattern = PATTERNS[move.have.state, move.need.state][backward]
    if pattern is None:
        return 0, 0
    if pattern == "reduce":
        volume = ring_bytes(prod(move.shape), move.size)
        return volume, volume
    own = [move.owners.region(r, move.shape) for r in range(move.size)]
    need = [move.needers.region(r, move.shape) for r in range(move.size)]
    given, taken = _exchanged(own, need, rank)
    return (given, taken) if pattern == "spread" else (taken, given)


def _normalised(
    plans: Sequence[ReplicaPlan], arrangement: Arrangement, index: int, rank: int, trained: Sequence[bool]
) -> Iterator[Flow]:
    """What is exchanged to normalise over samples, pixels or channels of several ranks."""
    plan = plans[index]
    for i, (operation, step) in enumerate(zip(plan.network.operations, plan.steps, strict=True)):
        gives, others = step.choice.gives, None
        if operation.kind == "group_norm" and gives.state == "split":
            groups = operation.shape[0] * operation.groups
            others, forward, backward = plan.size - 1, _STATISTICS * groups, _BACKWARD_SUMS * groups
        elif operation.kind == "batch_norm" and gives.along(2) is not None:
            channels = operation.shape[1]
            others, forward, backward = arrangement.size - 1, 2 * channels + 1, _BACKWARD_SUMS * channels
        elif operation.kind == "batch_norm" and len(plans) > 1:
            sent, received = _between_replicas(plans, arrangement, i, arrangement.ranks_of(index)[rank])
            rows = _STATISTICS + (_BACKWARD_SUMS if trained[i] else 0)
            yield "statistics", rows * sent, rows * received
        if others is not None:
            volume = others * (forward + (backward if trained[i] else 0))
            yield "statistics", volume, volume


def _between_replicas(
    plans: Sequence[ReplicaPlan], arrangement: Arrangement, operation: int, rank: int
) -> tuple[int, int]:
    """Numbers that `rank` (of all) sends and receives for one row of statistics of a BatchNorm along the data axis."""
    channels = plans[0].network.operations[operation].shape[1]
    own: list[Region] = []
    need: list[Region] = []
    for index, (plan, replica) in enumerate(zip(plans, arrangement.replicas, strict=True)):
        parts = plan.steps[operation].choice.gives.along(1)
        all_replicas = ((0, len(plans)),)
        own += [(((index, index + 1),), part) for part in parts or divide((channels,), replica.shares)]
        need += [(all_replicas, part) for part in parts or [((0, channels),)] * replica.size]
    return _exchanged(own, need, rank)


def _summed(plans: Sequence[ReplicaPlan], arrangement: Arrangement, index: int, rank: int) -> Iterator[Flow]:
    """What it takes to sum the gradients of weights that several ranks have."""
    world, me = arrangement.size, arrangement.ranks_of(index)[rank]
    for shape, layouts in _trainable(plans):
        if layouts[0].state == "split":
            if len(plans) > 1:
                own, held = owners(layouts, shape), holders(layouts, shape)
                to_others, from_others = _exchanged(own, held, me)
                yield "gradients", to_others + from_others, to_others + from_others
        elif layouts[0].state == "whole" or len(plans) > 1:
            volume = ring_bytes(prod(shape), world)
            yield "gradients", volume, volume


def _trainable(plans: Sequence[ReplicaPlan]) -> Iterator[tuple[Shape, list[Layout]]]:
    """Shape of every trainable weight, and its layout in every replica."""
    for name, shard in plans[0].shards.items():
        if shard.trainable:
            yield shard.shape, [plan.shards[name].layout for plan in plans]


def _exchanged(own: Sequence[Region], need: Sequence[Region], rank: int) -> tuple[int, int]:
    """Elements that `rank` sends to and receives from others when owners tell all who need."""
    others = [r for r in range(len(own)) if r != rank]
    return sum(common(own[rank], need[r]) for r in others), sum(common(own[r], need[rank]) for r in others)


def _bytes_by_kind(flows: Iterable[Flow], element_bytes: int) -> dict[str, tuple[float, float]]:
    """Bytes (sent, received) by kind; statistics are never of less than single precision."""
    sums: dict[str, tuple[float, float]] = {}
    for kind, sent, received in flows:
        width = max(element_bytes, 4) if kind == "statistics" else element_bytes
        before = sums.get(kind, (0.0, 0.0))
        sums[kind] = before[0] + sent * width, before[1] + received * width
    return {kind: both for kind, both in sums.items() if any(both)}
