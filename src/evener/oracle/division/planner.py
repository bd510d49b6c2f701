"""Walks through a network and decides, operation by operation, how it is divided and what has to move before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from evener.oracle.division import rules
from evener.oracle.division.layout import WHOLE, Layout, divide, is_disjoint, split
from evener.oracle.division.moves import Move
from evener.oracle.division.network import Kind, Network, Operation
from evener.oracle.division.rules import Choice, Rule, Situation
from evener.oracle.division.weights import weight_layouts

_DIVIDES = (rules.by_filter, rules.by_channel, rules.by_enough_channels, rules.by_narrower_side, rules.by_window)
_BY_MODE = {"filter": rules.by_filter, "channel": rules.by_channel}
_KEEPS_CHANNELS = ("pool", "resize", "average", "pointwise", "batch_norm", "group_norm")


@dataclass(frozen=True)
class Step:
    """One operation of a plan.

    Attributes:
        choice: how it is done.
        moves: of its inputs, before it.
        halo: of its only input, while it computes; None if it needs none.
        weights: layout of every parameter and buffer.
    """

    choice: Choice
    moves: tuple[Move, ...]
    halo: Move | None
    weights: tuple[Layout, ...]


@dataclass(kw_only=True)
class Planner:
    """Walks a network and remembers in which layouts each value is there.

    Attributes:
        network: to be divided.
        table: what to do with each kind of operation.
        divides_images: whether rows and columns of images are divided, and not channels.
        shares: of the ranks; of rows of ranks where there are columns.
        columns: shares of the columns of ranks.
        choices: that were made before, by name of the operation.
        modes: by name, that are to be kept.
        present: of every value so far, the layouts in which it is there.
    """

    network: Network
    table: dict[Kind, Rule]
    divides_images: bool
    shares: tuple[float, ...]
    columns: tuple[float, ...]
    choices: dict[str, Choice]
    modes: dict[str, str]
    present: list[list[Layout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.shares) * len(self.columns)
        self.ending = _ending(self.network, self.table)
        self.segments = _segments(self.network)

    def step(self, index: int) -> Step:
        """Decide on operation `index`, the next one."""
        operation = self.network.operations[index]
        choice = self.choices.get(operation.name) if operation.weights and not self.divides_images else None
        if choice is None:
            rule = _BY_MODE.get(self.modes.get(operation.name, ""), self.table[operation.kind])
            choice = self.choices[operation.name] = rule(self._situation(index))
        moves = [move for pair in zip(operation.inputs, choice.needs, strict=True) for move in self._bring(*pair)]
        self.present.append([choice.gives])
        return Step(choice, tuple(moves), self._halo(operation, choice), weight_layouts(operation, choice))

    def _halo(self, operation: Operation, choice: Choice) -> Move | None:
        if choice.reach is None:
            return None
        value = operation.inputs[0]
        shape = self.network.operations[value].shape
        return Move(value, shape, self.size, choice.needs[0], choice.reach)

    def _situation(self, index: int) -> Situation:
        operation = self.network.operations[index]
        return Situation(
            operation=operation,
            inputs=tuple(self.network.operations[i] for i in operation.inputs),
            haves=tuple(self.present[i][0] for i in operation.inputs),
            natural=self._natural(index),
            natural_inputs=tuple(self._natural(i) for i in operation.inputs),
            shares=self.shares,
            ends=index in self.ending,
        )

    def _natural(self, index: int) -> Layout:
        """How the output of operation `index` is best divided; whole if there is nothing to divide."""
        operation = self.network.operations[index]
        if not self.divides_images:
            segments = self.segments.get(index)
            return split({1: divide(segments, self.shares)}) if segments else WHOLE
        if not operation.is_image:
            return WHOLE
        rows = divide(operation.shape[2:3], self.shares)
        columns = divide(operation.shape[3:], self.columns)
        grid = [(row, column) for row in rows for column in columns]
        return split({2: tuple(row for row, _ in grid), 3: tuple(column for _, column in grid)})

    def _bring(self, value: int, need: Layout) -> list[Move]:
        """The cheapest moves that bring `value` to where it is needed; none if it is there."""
        present, shape = self.present[value], self.network.operations[value].shape
        if need in present:
            return []
        direct = [have for have in present if need.state != "split" or have.state in ("split", "whole")]
        if not direct and is_disjoint(need, shape):
            direct = present
        first = [] if direct else self._bring(value, WHOLE)
        ways = [Move(value, shape, self.size, have, need) for have in direct or [WHOLE]]
        present.append(need)
        return [*first, min(ways, key=Move.cost)]


def _ending(network: Network, table: dict[Kind, Rule]) -> set[int]:
    """The operations after which the ranks do all alike: nothing divides what follows."""
    users = network.users()
    ending: set[int] = set()
    for i in reversed(range(len(network.operations))):
        kinds = [network.operations[user].kind for user in users[i]]
        pairs = zip(kinds, users[i], strict=True)
        if all(kind == "output" or (user in ending and table[kind] not in _DIVIDES) for kind, user in pairs):
            ending.add(i)
    return ending


def _segments(network: Network) -> dict[int, tuple[int, ...]]:
    """The stretches of channels of every value that are used by themselves, each of which is to be divided."""
    segments = {i: op.shape[1:2] for i, op in enumerate(network.operations) if len(op.shape) > 1}
    users = network.users()
    for i in reversed(range(len(network.operations))):
        cuts = {bound for user in users[i] for bound in network.operations[user].bounds if _is_part(network, user)}
        if cuts:
            edges = sorted(cuts | {0, *segments[i]})
            segments[i] = tuple(b - a for a, b in pairwise(edges))
        operation = network.operations[i]
        if operation.kind in _KEEPS_CHANNELS:
            for source in operation.inputs:
                if segments.get(source) == (sum(segments[i]),):
                    segments[source] = segments[i]
    return segments


def _is_part(network: Network, index: int) -> bool:
    return network.operations[index].kind == "part"
