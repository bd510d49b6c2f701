"""Walks through a network and decides for each operation how it is divided and which values move before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from evener.oracle.division import rules
from evener.oracle.division.network import Kind, Network, Operation, Weight
from evener.oracle.division.placement import (
    ALIKE_ON_ALL,
    ON_ALL,
    Apart,
    Placement,
    Split,
    Transfer,
    elements_moved,
    split_along,
)
from evener.oracle.division.rules import TABLE, Choice, DivisionName, Rule, Situation

_DIVIDES = (rules.by_filter, rules.by_channel, rules.by_enough_channels, rules.by_narrower_side, rules.by_window)
_BY_MODE = {"filter": rules.by_filter, "channel": rules.by_channel}
_KEEPS_CHANNELS = ("pool", "resize", "average", "pointwise", "batch_norm", "group_norm")


@dataclass(frozen=True)
class DividedOperation:
    """How one operation is divided, for any shares of the ranks.

    Attributes:
        choice: how it is done.
        transfers: transfers of its inputs, before it.
        weights: placement of every parameter and buffer.
    """

    choice: Choice
    transfers: tuple[Transfer, ...]
    weights: tuple[Placement, ...]


@dataclass(kw_only=True)
class Planner:
    """Walks a network and remembers the placements of each value.

    Attributes:
        network: the network to divide.
        table: the rule for each kind of operation.
        divides_images: whether the first two sides of images and volumes are divided, and not channels.
        size: number of ranks.
        choices: earlier choices, by name of the operation.
        modes: modes to keep, by name of the operation.
        present: the placements of every value so far.
    """

    network: Network
    table: dict[Kind, Rule]
    divides_images: bool
    size: int
    choices: dict[str, Choice]
    modes: dict[str, str]
    present: list[list[Placement]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ending = _ending(self.network, self.table)
        self.segments = _segments(self.network)
        self.uses = Counter(operation.name for operation in self.network.operations if operation.weights)

    def step(self, index: int) -> DividedOperation:
        """Decide on operation `index`, the next one."""
        operation = self.network.operations[index]
        known = self.choices if operation.weights and not self.divides_images else {}
        choice = known.get(operation.name)
        if choice is None:
            choice = known[operation.name] = self._rule(operation)(self._situation(index))
        elif operation.kind == "other":  # this call may have more inputs
            choice = replace(choice, needs=(choice.gives,) * len(operation.inputs))
        pairs = zip(operation.inputs, choice.needs, strict=True)
        moved = [transfer for value, need in pairs for transfer in self._bring(value, need)]
        self.present.append([choice.gives])
        return DividedOperation(choice, tuple(moved), weight_placements(operation, choice))

    def _rule(self, operation: Operation) -> Rule:
        if operation.shares_weights or (self.divides_images and self._is_repeated(operation)):
            return rules.repeated_by_all
        mode = self.modes.get(operation.name, "") if operation.weights else ""
        return _BY_MODE.get(mode, self.table[operation.kind])

    def _is_repeated(self, operation: Operation) -> bool:
        """Return whether the operation runs several times without its rows being divided each time."""
        is_strip = operation.is_image and bool(operation.windows)
        return self.uses[operation.name] > 1 and operation.kind in ("convolution", "linear", "other") and not is_strip

    def _situation(self, index: int) -> Situation:
        operation = self.network.operations[index]
        return Situation(
            operation=operation,
            inputs=tuple(self.network.operations[i] for i in operation.inputs),
            haves=tuple(self.present[i][0] for i in operation.inputs),
            natural=self._natural(index),
            natural_inputs=tuple(self._natural(i) for i in operation.inputs),
            size=self.size,
            ends=index in self.ending,
        )

    def _natural(self, index: int) -> Placement:
        """Return how the output of operation `index` is best divided; on all ranks if nothing can be divided."""
        operation = self.network.operations[index]
        if not self.divides_images:
            segments = self.segments.get(index)
            return split_along({1: Apart(segments)}) if segments else ON_ALL
        if not operation.is_image:
            return ON_ALL
        return split_along({2: Apart(operation.shape[2:3]), 3: Apart(operation.shape[3:4], axis=1)})

    def _bring(self, value: int, need: Placement) -> list[Transfer]:
        """Return the cheapest transfers that bring `value` to the placement `need`; none if it is there."""
        present, shape = self.present[value], self.network.operations[value].shape
        if need in present:
            return []
        direct = [have for have in present if need.state != "split" or have.state in ("split", "whole")]
        if not direct and need.is_disjoint:
            direct = present
        first = [] if direct else self._bring(value, ON_ALL)
        have = min(direct or [ON_ALL], key=lambda have: elements_moved(shape, have, need))
        present.append(need)
        return [*first, Transfer(value, have, need)]


def _ending(network: Network, table: dict[Kind, Rule]) -> set[int]:
    """Return the operations after which all ranks do the same, because nothing divides what follows."""
    users = network.users()
    ending: set[int] = set()
    for i in reversed(range(len(network.operations))):
        kinds = [network.operations[user].kind for user in users[i]]
        pairs = zip(kinds, users[i], strict=True)
        if all(kind == "output" or (user in ending and table[kind] not in _DIVIDES) for kind, user in pairs):
            ending.add(i)
    return ending


def _segments(network: Network) -> dict[int, tuple[int, ...]]:
    """Return the channel segments of every value that are used separately; each of them is divided.

    A value of fewer than two dims has none.
    """
    segments = {i: op.shape[1:2] for i, op in enumerate(network.operations) if len(op.shape) > 1}
    users = network.users()
    for i in reversed(range(len(network.operations))):
        cuts = {bound for user in users[i] for bound in network.operations[user].bounds if _is_part(network, user)}
        if cuts:
            edges = sorted(cuts | {0, *segments[i]})
            segments[i] = tuple(b - a for a, b in pairwise(edges))
        operation = network.operations[i]
        if operation.kind in _KEEPS_CHANNELS and i in segments:
            for source in operation.inputs:
                if segments.get(source) == (sum(segments[i]),):
                    segments[source] = segments[i]
    return segments


def _is_part(network: Network, index: int) -> bool:
    return network.operations[index].kind == "part"


@dataclass(frozen=True)
class DividedNetwork:
    """How a network is divided, for any shares of the ranks.

    Attributes:
        network: the network.
        operations: one per operation.
    """

    network: Network
    operations: tuple[DividedOperation, ...]

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """The choices of operations with weights, by name."""
        pairs = zip(self.network.operations, self.operations, strict=True)
        return {op.name: divided.choice for op, divided in pairs if op.weights}


def divide_network(
    network: Network,
    division: DivisionName,
    size: int,
    choices: Mapping[str, Choice] = {},
    modes: Mapping[str, str] = {},
    inputs: Rule = rules.everywhere,
) -> DividedNetwork:
    """Return how any `size` ranks divide `network`.

    Args:
        network: with the shapes of a batch.
        division: the column of THE TABLE.
        size: number of ranks.
        choices: earlier choices to keep, by name of the operation.
        modes: modes to keep, by name of the operation.
        inputs: rule of inputs: `rules.alike` where every rank needs their gradient.
    """
    planner = Planner(
        network=network,
        table={**TABLE[division], "input": inputs},
        divides_images=division == "spatial",
        size=size,
        choices=dict(choices),
        modes=dict(modes),
    )
    return DividedNetwork(network, tuple(planner.step(i) for i in range(len(network.operations))))


def weight_placements(operation: Operation, choice: Choice) -> tuple[Placement, ...]:
    """Return the placement of each weight, which follows from how the operation is done.

    split   a part: its gradient is complete within the replica
    whole   the complete weight: the ranks' gradients are addends
    alike   the complete weight: every rank of the replica has its gradient
    """
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
