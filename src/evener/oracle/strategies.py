"""THE TABLE: how each strategy divides each kind of operation; and the plan of a network that follows from it.

    out, in, hybrid   filters or channels, as published: every value is gathered, so that the ranks do the rest alike
    sharded           filters and channels: values stay divided by channel, convolutions move their narrower side
    spatial           rows and columns of images

All of them are hybrids with data parallelism when there are several replicas: groups of ranks that hold one model
together, each with samples of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from evener.errors import require
from evener.oracle.division import rules
from evener.oracle.division.network import Kind, Network
from evener.oracle.division.planner import Planner, Step
from evener.oracle.division.rules import Choice, Rule
from evener.oracle.division.weights import Shard
from evener.schema import Part

__all__ = [
    "TABLE",
    "Arrangement",
    "Division",
    "Replica",
    "ReplicaPlan",
    "Step",
    "plan_replica",
    "plan_replicas",
]

Division: TypeAlias = Literal["out", "in", "hybrid", "sharded", "spatial"]

_SHARDED: dict[Kind, Rule] = {
    "input": rules.everywhere,
    "constant": rules.everywhere,
    "convolution": rules.by_narrower_side,
    "linear": rules.by_narrower_side,
    "pool": rules.follow,
    "resize": rules.follow,
    "average": rules.follow,
    "pointwise": rules.join,
    "batch_norm": rules.normalise,
    "group_norm": rules.follow,
    "concat": rules.concatenated_channels,
    "part": rules.part_of_channels,
    "flatten": rules.flattened_channels,
    "other": rules.undivided,
    "output": rules.alike,
}
_PUBLISHED: dict[Kind, Rule] = {
    **dict.fromkeys(get_args(Kind), rules.alike),
    "input": rules.everywhere,
    "constant": rules.everywhere,
}
_SPATIAL: dict[Kind, Rule] = {
    **_SHARDED,
    "convolution": rules.by_window,
    "linear": rules.undivided,
    "pool": rules.by_window,
    "resize": rules.by_window,
    "average": rules.averaged_rows,
    "concat": rules.join,
    "part": rules.follow,
    "flatten": rules.undivided,
}
TABLE: dict[Division, dict[Kind, Rule]] = {
    "out": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), rules.by_filter)},
    "in": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), rules.by_channel)},
    "hybrid": {**_PUBLISHED, **dict.fromkeys(("convolution", "linear"), rules.by_enough_channels)},
    "sharded": _SHARDED,
    "spatial": _SPATIAL,
}


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
    steps: tuple[Step, ...]

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
