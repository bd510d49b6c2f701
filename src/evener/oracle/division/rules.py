"""THE TABLE: how each strategy divides each kind of operation, from its inputs' layouts to those needed and given.

    filter, channel, hybrid   as published: every value is gathered, so that the ranks do the rest alike
    sharded                   values stay divided by channel, convolutions move their narrower side
    spatial                   rows and columns of images, planes and rows of volumes

Two families. By channel: every rank has some channels of every value; only convolutions and linear layers mix them, as
`filter` (own filters, from all channels that these read) or as `channel` (addends of all filters, from own channels).
By the first two sides: every rank has a box of every image or volume; windows reach beyond it.
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
        mode: of a convolution or linear layer: by `filter`, by `channel` or as a `strip` of rows; else empty.
        reach: of a `strip` whose input has another layout than its windows reach: the layout of what they reach.
        adds: of a `channel`: the filters whose bias each rank adds to its addend.
    """

    needs: tuple[Placement, ...]
    gives: Placement
    mode: Literal["", "filter", "channel", "strip"] = ""
    reach: Placement | None = None
    adds: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a rule knows.

    Attributes:
        operation: to be divided.
        inputs: the operations whose outputs it reads.
        haves: layouts of these outputs.
        natural: how its own output is best divided; not at all if that has nothing to divide.
        natural_inputs: likewise of what it reads.
        size: number of ranks.
        ends: whether the ranks do alike all that follows.
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
    """An input or a constant: every rank has it."""
    return Choice((), ON_ALL)


def alike(s: Situation) -> Choice:
    """Every rank does the same."""
    return Choice((ALIKE_ON_ALL,) * len(s.haves), ALIKE_ON_ALL)


def repeated_by_all(s: Situation) -> Choice:
    """Every rank does all of it, for what it does afterwards."""
    return Choice((ON_ALL,) * len(s.haves), ON_ALL)


def undivided(s: Situation) -> Choice:
    """Every rank does all of it."""
    if s.ends or (s.haves and all(have == ALIKE_ON_ALL for have in s.haves)):
        return alike(s)
    return repeated_by_all(s)


def follow(s: Situation) -> Choice:
    """Each rank does its part of the only input, however that is divided."""
    have = _settled(s, 0)
    return Choice((have,), have)


def normalise(s: Situation) -> Choice:
    """Statistics of an undivided value would count it several times: divide it, or do it alike everywhere."""
    have = s.haves[0] if s.haves[0].state in ("split", "alike") else s.natural_inputs[0]
    return Choice((have,), have) if have.state == "split" else alike(s)


def join(s: Situation) -> Choice:
    """Operations on several inputs, number by number: divided as the output is, unless all inputs are whole."""
    target = _target(s)
    if target.state != "split":
        return undivided(s)
    return Choice(tuple(_broadcast(target, s.operation.shape, one.shape) for one in s.inputs), target)


def by_filter(s: Situation) -> Choice:
    """Own filters, from all channels that these read."""
    groups = s.operation.groups
    if groups == 1:
        return Choice((ON_ALL,), s.natural, "filter")
    own = Apart((groups,))
    reads, gives = (split_along({1: repeated(own, one.shape[1] // groups)}) for one in (s.inputs[0], s.operation))
    return Choice((reads,), gives, "filter")


def by_channel(s: Situation) -> Choice:
    """An addend of all filters, from own channels; groups have few channels each, so they stay together."""
    if s.operation.groups > 1:
        return by_filter(s)
    return Choice((_divided(s, 0),), ADDENDS, "channel", adds=s.natural)


def by_enough_channels(s: Situation) -> Choice:
    """By channel where every rank would get one, else by filter."""
    return by_channel(s) if s.inputs[0].shape[1] >= s.size else by_filter(s)


def by_narrower_side(s: Situation) -> Choice:
    """By filter or by channel, whichever moves less over all ranks: that does not depend on their shares."""
    return min((by_filter(s), by_channel(s)), key=lambda choice: _cost(s, choice))


def concatenated_channels(s: Situation) -> Choice:
    """Each rank's part of the concatenation is the concatenation of its parts."""
    if s.operation.concat_dim != 1 or not any(have.state in ("split", "partial") for have in s.haves):
        return join(s)
    needs = [_divided(s, i) for i in range(len(s.haves))]
    parts = [need.along(1) for need in needs]
    sizes = [one.shape[1] for one in s.inputs]
    return Choice(tuple(needs), split_along({1: stacked([part for part in parts if part is not None], sizes)}))


def part_of_channels(s: Situation) -> Choice:
    """A stretch of the channels: of a value that is divided within each of its stretches, everybody has some."""
    need = s.natural_inputs[0]
    parts = need.along(1)
    if parts is None or s.haves[0].state in ("whole", "alike"):
        return follow(s)
    return Choice((need,), split_along({1: section(parts, *s.operation.bounds)}))


def flattened_channels(s: Situation) -> Choice:
    """Each channel becomes as many features as it has pixels."""
    need = follow(s).needs[0]
    parts = need.along(1)
    if parts is None:
        return Choice((need,), need)
    return Choice((need,), split_along({1: repeated(parts, prod(s.inputs[0].shape[2:]))}))


def by_window(s: Situation) -> Choice:
    """A box of the output, from the box of the input that its windows reach."""
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
    """The mean over all pixels is the sum of the ranks' addends."""
    have = s.haves[0]
    return Choice((have,), ADDENDS) if have.state == "split" else undivided(s)


def _target(s: Situation) -> Placement:
    """The layout of the output of `join`: one that most inputs have already."""
    states = {have.state for have in s.haves}
    if "split" not in states and (s.ends or "partial" not in states):
        return ON_ALL
    if s.natural in s.haves or s.natural.state != "split":
        return s.natural
    pairs = zip(s.haves, s.inputs, strict=True)
    full = (have for have, one in pairs if have.state == "split" and one.shape == s.operation.shape)
    return next(full, s.natural)


def _broadcast(target: Placement, shape: Shape, own: Shape) -> Placement:
    """`target`, a layout of `shape`, for an input of shape `own` that is broadcast to it."""
    shift = len(shape) - len(own)
    parts = {d - shift: p for d, p in target.splits if d >= shift and own[d - shift] == shape[d]}
    return split_along(parts) if parts else ON_ALL


def _settled(s: Situation, i: int) -> Placement:
    """The layout of input `i`, or that in which its addends are best summed."""
    if s.haves[i] != ADDENDS:
        return s.haves[i]
    return ALIKE_ON_ALL if s.ends else s.natural_inputs[i]


def _divided(s: Situation, i: int) -> Placement:
    """The layout of input `i`, or its natural one if it is not divided."""
    return s.haves[i] if s.haves[i].state == "split" else s.natural_inputs[i]


def _cost(s: Situation, choice: Choice) -> int:
    """Elements that all ranks together move for `choice`: its input, and its output to where that is needed."""
    output = ALIKE_ON_ALL if s.ends else s.natural
    before = elements_moved(s.inputs[0].shape, s.haves[0], choice.needs[0])
    return before + elements_moved(s.operation.shape, choice.gives, output)


def _reach(operation: Operation, gives: Placement, shape: Shape) -> Placement:
    """What of an input of `shape` the windows of every rank's part of the output reach."""
    windows = operation.windows
    return split_along({dim: reached(split, windows[dim - 2], shape[dim]) for dim, split in gives.splits})


Division: TypeAlias = Literal["filter", "channel", "hybrid", "sharded", "spatial"]
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
TABLE: dict[Division, dict[Kind, Rule]] = {
    "filter": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_filter)},
    "channel": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_channel)},
    "hybrid": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), by_enough_channels)},
    "sharded": _SHARDED,
    "spatial": _SPATIAL,
}


def division_of(strategy: str) -> Division:
    """The division inside of the replicas or stages of a strategy, such as `data+filter`; it has one."""
    inside = strategy.rpartition("+")[2]
    return next(division for division in TABLE if division == inside)
