"""How each replica performs a division: the intervals of each of its ranks, and the moves between them.

With several replicas every division is a hybrid with data parallelism: groups of ranks that hold one model together,
each with samples of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from evener.oracle.division.layout import Layout, Move, Replica, Shape
from evener.oracle.division.network import Network
from evener.oracle.division.placement import layout_of
from evener.oracle.division.planner import DividedNetwork, divide_network
from evener.oracle.division.rules import DivisionName
from evener.records.errors import require
from evener.records.schema import Part


class Arrangement(Part, frozen=True, kw_only=True):
    """How the ranks of a run divide a model and the samples.

    Attributes:
        division: division of the model within each replica.
        replicas: in order of ranks: first the ranks of the first replica, then those of the second, and so on.
    """

    division: DivisionName
    replicas: tuple[Replica, ...]

    def __post_init__(self) -> None:
        require(bool(self.replicas), "replicas", self.replicas, "at least one")
        for replica in self.replicas:
            square = self.division == "spatial" or len(replica.columns) == 1
            allowed = f"(1.0,) for division {self.division}: only images have columns"
            require(square, "columns", replica.columns, allowed)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(replica.size for replica in self.replicas)

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of a replica."""
        first = sum(earlier.size for earlier in self.replicas[:replica])
        return range(first, first + self.replicas[replica].size)


@dataclass(frozen=True, slots=True)
class LocalChoice:
    """A `Choice` among certain ranks: every placement with its intervals."""

    needs: tuple[Layout, ...]
    gives: Layout
    mode: Literal["", "filter", "channel", "strip"]
    reach: Layout | None
    adds: Layout | None


@dataclass(frozen=True)
class OperationPlan:
    """One operation of a replica's plan.

    Attributes:
        choice: how it is done.
        moves: moves of its inputs, before it.
        halo: move of its only input, while it computes; None if it needs none.
        weights: layout of every parameter and buffer.
    """

    choice: LocalChoice
    moves: tuple[Move, ...]
    halo: Move | None
    weights: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight of a divided model.

    Attributes:
        name: name in the model's state dict.
        shape: shape of the complete weight.
        layout: how the ranks of a replica hold it.
        trainable: whether it has a gradient.
    """

    name: str
    shape: Shape
    layout: Layout
    trainable: bool


@dataclass(frozen=True)
class ReplicaPlan:
    """The operations of the ranks of a replica.

    Attributes:
        network: the network that they hold together.
        size: number of ranks.
        steps: one per operation.
        divided: the division that this plan applies to these ranks.
    """

    network: Network
    size: int
    steps: tuple[OperationPlan, ...]
    divided: DividedNetwork

    @property
    def divides(self) -> bool:
        """Whether a rank does only a part of any operation."""
        return any(step.choice.gives.state in ("split", "partial") for step in self.steps)

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """All weights of the operations, by name, in the order of their first use."""
        shards: dict[str, Shard] = {}
        for operation, step in zip(self.network.operations, self.steps, strict=True):
            for weight, layout in zip(operation.weights, step.weights, strict=True):
                name = f"{operation.name}.{weight.name}" if weight.name else operation.name
                shards.setdefault(name, Shard(name, weight.shape, layout, weight.trainable))
        return shards


def plan_replicas(network: Network, arrangement: Arrangement) -> tuple[ReplicaPlan, ...]:
    """Return the plan of each replica; all replicas use the same mode (filter or channel) for each operation.

    Args:
        network: with the shapes of a batch.
        arrangement: arrangement of all ranks.
    """
    first, *others = arrangement.replicas
    leading = plan_replica(network, arrangement.division, first)
    rest = (plan_replica(network, arrangement.division, replica, leading=leading) for replica in others)
    return leading, *rest


def plan_replica(
    network: Network,
    division: DivisionName,
    replica: Replica,
    *,
    before: ReplicaPlan | None = None,
    leading: ReplicaPlan | None = None,
) -> ReplicaPlan:
    """Return the plan by which the ranks of `replica` divide `network`.

    Args:
        network: with the shapes of a batch.
        division: the column of THE TABLE.
        replica: the ranks and their shares.
        before: their plan for another shape, which has fixed the division of weights.
        leading: another replica's plan, whose modes are kept.
    """
    choices = before.divided.choices if before else {}
    modes = {name: choice.mode for name, choice in leading.divided.choices.items()} if leading else {}
    return plan_among(divide_network(network, division, replica.size, choices, modes), replica)


def plan_among(divided: DividedNetwork, replica: Replica) -> ReplicaPlan:
    """Return the plan of the ranks of `replica` for this division; parts that no rank lacks are not moved."""
    steps = tuple(_operation_plan(divided, index, replica) for index in range(len(divided.operations)))
    return ReplicaPlan(divided.network, replica.size, steps, divided)


def _operation_plan(divided_network: DividedNetwork, index: int, replica: Replica) -> OperationPlan:
    divided = divided_network.operations[index]
    choice, values = divided.choice, divided_network.network.operations
    needs = tuple(layout_of(need, replica) for need in choice.needs)
    reach = layout_of(choice.reach, replica) if choice.reach is not None else None
    adds = layout_of(choice.adds, replica) if choice.adds is not None else None
    halo = None
    if reach is not None and reach != needs[0]:
        value = values[index].inputs[0]
        halo = Move(value, values[value].shape, replica.size, needs[0], reach)
    moves = (
        Move(
            transfer.value,
            values[transfer.value].shape,
            replica.size,
            layout_of(transfer.have, replica),
            layout_of(transfer.need, replica),
        )
        for transfer in divided.transfers
    )
    return OperationPlan(
        LocalChoice(needs, layout_of(choice.gives, replica), choice.mode, reach if halo else None, adds),
        tuple(move for move in moves if move.have != move.need),
        halo,
        tuple(layout_of(weight, replica) for weight in divided.weights),
    )
