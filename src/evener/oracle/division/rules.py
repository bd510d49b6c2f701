"""THE TABLE: how each division of layers divides each kind of operation, from given layouts to those needed and made.

    filter, channel, hybrid   as published: every value is gathered, so that all ranks do the remaining operations
    sharded                   values stay divided by channel; convolutions move their narrower side
    spatial                   rows and columns of images, planes and rows of volumes

There are two families. By channel: every rank has some channels of every value. Only convolutions and linear layers mix
channels, as `filter` (own filters, from all channels that these read) or as `channel` (addends of all filters, from own
channels). By the first two sides: every rank has a box of every image or volume; windows reach beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, get_args

from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Kind, Operation
from evener.oracle.division.placement import (
    ADDENDS,
    ALIKE_ON_ALL,
    ON_ALL,
    Apart,
    Placement,
    elements_moved,
    reached,
    repeated,
    section,
    split_along,
    stacked,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """How one operation is done.

    Attributes:
        needs: layout of every input.
        gives: layout of the output.
        mode: for a convolution or linear layer: by `filter`, by `channel` or as a `strip` of rows; else empty.
        reach: for a `strip` whose windows reach beyond its input's layout: the layout of what they reach.
        adds: for a `channel`: the filters whose bias each rank adds to its addend.
    """

    needs: tuple[Placement, ...]
    gives: Placement
    mode: Literal["", "filter", "channel", "strip"] = ""
    reach: Placement | None = None
    adds: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of a rule.

    Attributes:
        operation: the operation to divide.
        inputs: the operations whose outputs it reads.
        haves: layouts of these outputs.
        natural: how its output is best divided; undivided if nothing can be divided.
        natural_inputs: how each of its inputs is best divided.
        size: number of ranks.
        ends: whether all ranks do the same in all following operations.
    """

    operation: Operation
    inputs: tuple[Operation, ...]
    haves: tuple[Placement, ...]
    natural: Placement
    natural_inputs: tuple[Placement, ...]
    size: int
    ends: bool


Rule: TypeAlias = Callable[[Situation], Choice]


def everywhere(_: Situation) -> Choice:
    """Give every rank the complete input or constant."""
    return Choice((), ON_ALL)


def alike(s: Situation) -> Choice:
    """Let every rank do the same, with the same gradient on each."""
    return Choice((ALIKE_ON_ALL,) * len(s.haves), ALIKE_ON_ALL)


def repeated_by_all(s: Situation) -> Choice:
    """Let every rank do all of it, for its own following operations."""
    return Choice((ON_ALL,) * len(s.haves), ON_ALL)


def undivided(s: Situation) -> Choice:
    """Let every rank do all of it, in the same way everywhere where that is possible."""
    if s.ends or (s.haves and all(have == ALIKE_ON_ALL for have in s.haves)):
        return alike(s)
    return repeated_by_all(s)


def follow(s: Situation) -> Choice:
    """Let each rank do its part of the only input, in any layout."""
    have = _settled(s, 0)
    return Choice((have,), have)


def normalise(s: Situation) -> Choice:
    """Divide it, or do it the same everywhere: statistics of an undivided value would count it several times."""
    have = s.haves[0] if s.haves[0].state in ("split", "alike") else s.natural_inputs[0]
    return Choice((have,), have) if have.state == "split" else alike(s)


def join(s: Situation) -> Choice:
    """Divide an element-wise operation like its output, unless all inputs are complete."""
    target = _target(s)
    if target.state != "split":
        return undivided(s)
    needs = tuple(_broadcast(target, s.operation.shape, source.shape) for source in s.inputs)
    return Choice(needs, target)


def by_filter(s: Situation) -> Choice:
    """Give each rank its own filters, from all channels that these read."""
    groups = s.operation.groups
    if groups == 1:
        return Choice((ON_ALL,), s.natural, "filter")
    groups_split = Apart((groups,))
    reads, gives = (
        split_along({1: repeated(groups_split, operation.shape[1] // groups)})
        for operation in (s.inputs[0], s.operation)
    )
    return Choice((reads,), gives, "filter")


def by_channel(s: Situation) -> Choice:
    """Give each rank an addend of all filters, from its own channels; groups have few channels and stay together."""
    if s.operation.groups > 1:
        return by_filter(s)
    return Choice((_divided(s, 0),), ADDENDS, "channel", adds=s.natural)


def by_enough_channels(s: Situation) -> Choice:
    """Divide by channel where every rank would get one, else by filter."""
    return by_channel(s) if s.inputs[0].shape[1] >= s.size else by_filter(s)


def by_narrower_side(s: Situation) -> Choice:
    """Divide by filter or by channel, whichever moves less over all ranks; this does not depend on their shares."""
    return min((by_filter(s), by_channel(s)), key=lambda choice: _cost(s, choice))


def concatenated_channels(s: Situation) -> Choice:
    """Let each rank concatenate its parts."""
    if s.operation.concat_dim != 1 or not any(have.state in ("split", "partial") for have in s.haves):
        return join(s)
    needs = [_divided(s, i) for i in range(len(s.haves))]
    parts = [need.along(1) for need in needs]
    sizes = [source.shape[1] for source in s.inputs]
    return Choice(tuple(needs), split_along({1: stacked([part for part in parts if part is not None], sizes)}))


def part_of_channels(s: Situation) -> Choice:
    """Take an interval of the channels; a value is divided within each of its segments, so every rank has some."""
    need = s.natural_inputs[0]
    parts = need.along(1)
    if parts is None or s.haves[0].state in ("whole", "alike"):
        return follow(s)
    return Choice((need,), split_along({1: section(parts, *s.operation.bounds)}))


def flattened_channels(s: Situation) -> Choice:
    """Flatten: each channel becomes as many features as it has pixels."""
    need = follow(s).needs[0]
    parts = need.along(1)
    if parts is None:
        return Choice((need,), need)
    return Choice((need,), split_along({1: repeated(parts, prod(s.inputs[0].shape[2:]))}))


def by_window(s: Situation) -> Choice:
    """Let each rank compute a box of the output from the box of the input that its windows reach."""
    if not (s.operation.is_image and s.operation.windows):
        return undivided(s)
    gives = s.natural
    reach = _reach(s.operation, gives, s.inputs[0].shape)
    if s.operation.kind != "convolution":
        return Choice((reach,), gives)
    have = s.haves[0]
    if have.state == "split" and have != reach:
        return Choice((have,), gives, "strip", reach)
    return Choice((reach,), gives, "strip")


def averaged_rows(s: Situation) -> Choice:
    """Compute the mean over all pixels as the sum of the ranks' addends."""
    have = s.haves[0]
    return Choice((have,), ADDENDS) if have.state == "split" else undivided(s)


def _target(s: Situation) -> Placement:
    """Return the layout of the output of `join`: one that most inputs have already."""
    states = {have.state for have in s.haves}
    if "split" not in states and (s.ends or "partial" not in states):
        return ON_ALL
    if s.natural in s.haves or s.natural.state != "split":
        return s.natural
    pairs = zip(s.haves, s.inputs, strict=True)
    full = (have for have, source in pairs if have.state == "split" and source.shape == s.operation.shape)
    return next(full, s.natural)


def _broadcast(target: Placement, shape: Shape, input_shape: Shape) -> Placement:
    """Return `target`, a layout of `shape`, for an input of `input_shape` that is broadcast to it."""
    shift = len(shape) - len(input_shape)
    parts = {d - shift: p for d, p in target.splits if d >= shift and input_shape[d - shift] == shape[d]}
    return split_along(parts) if parts else ON_ALL


def _settled(s: Situation, i: int) -> Placement:
    """Return the layout of input `i`, or the layout in which its addends are best summed."""
    if s.haves[i] != ADDENDS:
        return s.haves[i]
    return ALIKE_ON_ALL if s.ends else s.natural_inputs[i]


def _divided(s: Situation, i: int) -> Placement:
    """Return the layout of input `i`, or its natural one if it is not divided."""
    return s.haves[i] if s.haves[i].state == "split" else s.natural_inputs[i]


def _cost(s: Situation, choice: Choice) -> int:
    """Return the elements that all ranks move for `choice`: its input, and its output to its next placement."""
    output = ALIKE_ON_ALL if s.ends else s.natural
    before = elements_moved(s.inputs[0].shape, s.haves[0], choice.needs[0])
    return before + elements_moved(s.operation.shape, choice.gives, output)


def _reach(operation: Operation, gives: Placement, shape: Shape) -> Placement:
    """Return the part of an input of `shape` that the windows of each rank's part of the output reach."""
    windows = operation.windows
    return split_along({dim: reached(split, windows[dim - 2], shape[dim]) for dim, split in gives.splits})


DivisionName: TypeAlias = Literal["filter", "channel", "hybrid", "sharded", "spatial"]
"""A column of THE TABLE: how the model is divided inside a replica."""

_SHARDED: dict[Kind, Rule] = {
    "input": everywhere,
    "constant": everywhere,
    "convolution": by_narrower_side,
    "linear": by_narrower_side,
    "pool": follow,
    "resize": follow,
    "average": follow,
    "pointwise": join,
    "batch_norm": normalise,
    "group_norm": follow,
    "concat": concatenated_channels,
    "part": part_of_channels,
    "flatten": flattened_channels,
    "item": follow,
    "other": undivided,
    "whole": alike,
    "output": alike,
}
_PUBLISHED: dict[Kind, Rule] = {
    **dict.fromkeys(get_args(Kind), alike),
    "input": everywhere,
    "constant": everywhere,
    "item": follow,
}
_SPATIAL: dict[Kind, Rule] = {
    **_SHARDED,
    "convolution": by_window,
    "linear": undivided,
    "pool": by_window,
    "resize": by_window,
    "average": averaged_rows,
    "concat": join,
    "part": follow,
    "flatten": undivided,
}
TABLE: dict[DivisionName, dict[Kind, Rule]] = {
    "filter": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_filter)},
    "channel": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_channel)},
    "hybrid": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_enough_channels)},
    "sharded": _SHARDED,
    "spatial": _SPATIAL,
}


def division_of(strategy: str) -> DivisionName:
    """Return the division inside the replicas or stages of a strategy, such as `data+filter`."""
    inside = strategy.rpartition("+")[2]
    return next(division for division in TABLE if division == inside)
