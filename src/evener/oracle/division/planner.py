"""Walks through a network and decides, operation by operation, how it is divided and what has to move before it.

With several replicas every division is a hybrid with data parallelism: groups of ranks that hold one model together,
each with samples of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from evener.errors import require
from evener.oracle.division import rules
from evener.oracle.division.layout import WHOLE, Layout, Move, divide, is_disjoint, split
from evener.oracle.division.network import Kind, Network, Operation
from evener.oracle.division.rules import TABLE, Choice, Division, Rule, Situation
from evener.oracle.division.weights import Shard, weight_layouts
from evener.schema import Part

_DIVIDES = (rules.by_filter, rules.by_channel, rules.by_enough_channels, rules.by_narrower_side, rules.by_window)
_BY_MODE = {"filter": rules.by_filter, "channel": rules.by_channel}
_KEEPS_CHANNELS = ("pool", "resize", "average", "pointwise", "batch_norm", "group_norm")


@dataclass(frozen=True)
class OperationPlan:
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

    def step(self, index: int) -> OperationPlan:
        """Decide on operation `index`, the next one."""
        operation = self.network.operations[index]
        choice = self.choices.get(operation.name) if operation.weights and not self.divides_images else None
        if choice is None:
            rule = _BY_MODE.get(self.modes.get(operation.name, ""), self.table[operation.kind])
            choice = self.choices[operation.name] = rule(self._situation(index))
        moves = [move for pair in zip(operation.inputs, choice.needs, strict=True) for move in self._bring(*pair)]
        self.present.append([choice.gives])
        return OperationPlan(choice, tuple(moves), self._halo(operation, choice), weight_layouts(operation, choice))

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


class Replica(Part, frozen=True, kw_only=True):
    """Ranks that hold one model together.

    Attributes:
        shares: of the work, one a rank, in any unit: relative speeds. With columns, of the rows of ranks.
        columns: shares of the columns of ranks, where images are divided both ways.
    """

    shares: tuple[float, ...]
    columns: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, shares in (("shares", self.shares), ("columns", self.columns)):
            allowed = "at least one, zero or more each, not all zero"
            require(bool(shares) and min(shares) >= 0 and sum(shares) > 0, name, shares, allowed)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shares) * len(self.columns)


class Arrangement(Part, frozen=True, kw_only=True):
    """How the ranks of a run divide a model and the samples.

    Attributes:
        division: of the model, within each replica.
        replicas: in order of ranks: the first one's ranks, then the second one's ...
    """

    division: Division
    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        require(bool(self.replicas), "replicas", self.replicas, "at least one")
        for replica in self.replicas:
            square = self.division == "spatial" or len(replica.columns) == 1
            require(square, "columns", replica.columns, f"(1.0,) for division {self.division}: only images have any")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(replica.size for replica in self.replicas)

    def ranks_of(self, replica: int) -> range:
        """The ranks of a replica."""
        first = sum(one.size for one in self.replicas[:replica])
        return range(first, first + self.replicas[replica].size)


@dataclass(frozen=True)
class ReplicaPlan:
    """What the ranks of a replica do, operation by operation.

    Attributes:
        network: that they hold together.
        size: number of ranks.
        steps: one an operation.
    """

    network: Network
    size: int
    steps: tuple[OperationPlan, ...]

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """How operations with weights are done, by name."""
        pairs = zip(self.network.operations, self.steps, strict=True)
        return {op.name: step.choice for op, step in pairs if op.weights}

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """All weights of the operations, by name, in the order of their first use."""
        shards: dict[str, Shard] = {}
        for operation, step in zip(self.network.operations, self.steps, strict=True):
            for weight, layout in zip(operation.weights, step.weights, strict=True):
                name = f"{operation.name}.{weight.name}" if weight.name else operation.name
                shards.setdefault(name, Shard(name, weight.shape, layout, weight.trainable))
        return shards

    @property
    def exchanges(self) -> int:
        """Times that the ranks of the replica move values in a forward and a backward pass."""
        return 2 * sum(len(step.moves) + (step.halo is not None) for step in self.steps)

    @cached_property
    def gathers(self) -> tuple[str, ...]:
        """Names of what is not divided, for which a divided value has to be gathered."""
        pairs = zip(self.network.operations, self.steps, strict=True)
        return tuple(
            op.name
            for op, step in pairs
            if op.kind != "output" and not step.choice.mode and any(move.kind == "gather" for move in step.moves)
        )


def plan_replicas(network: Network, arrangement: Arrangement) -> tuple[ReplicaPlan, ...]:
    """How each replica divides `network`: all of them do each operation by filter, or all by channel.

    Args:
        network: with the shapes of a batch.
        arrangement: of all ranks.
    """
    first, *others = arrangement.replicas
    leading = plan_replica(network, arrangement.division, first)
    return leading, *(plan_replica(network, arrangement.division, one, leading=leading) for one in others)


def plan_replica(
    network: Network,
    division: Division,
    replica: Replica,
    *,
    before: ReplicaPlan | None = None,
    leading: ReplicaPlan | None = None,
) -> ReplicaPlan:
    """How the ranks of `replica` divide `network`.

    Args:
        network: with the shapes of a batch.
        division: the column of THE TABLE.
        replica: the ranks and their shares.
        before: their plan for another shape, by which weights are divided already.
        leading: another replica's plan, whose modes are to be kept.
    """
    planner = Planner(
        network=network,
        table=TABLE[division],
        divides_images=division == "spatial",
        shares=replica.shares,
        columns=replica.columns,
        choices=dict(before.choices) if before else {},
        modes={name: choice.mode for name, choice in leading.choices.items()} if leading else {},
    )
    return ReplicaPlan(network, replica.size, tuple(planner.step(i) for i in range(len(network.operations))))
