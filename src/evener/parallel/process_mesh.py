"""The position of a rank: the ranks that hold one model with it, and the replicas that share the samples."""

from __future__ import annotations

from dataclasses import dataclass

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.records.errors import require


@dataclass(frozen=True)
class ProcessMesh:
    """The position of this rank in an arranged run.

    Attributes:
        world: All ranks.
        group: The ranks of this rank's replica, which together hold one model.
        arrangement: The arrangement of all ranks.
        index: Index of this rank's replica.
        has_same_generators: Whether equal seeds make the devices of all ranks draw equal random numbers.
    """

    world: Group
    group: Group
    arrangement: Arrangement
    index: int
    has_same_generators: bool = True

    @property
    def replica(self) -> Replica:
        """This rank's replica."""
        return self.arrangement.replicas[self.index]


def form_process_mesh(world: Group, arrangement: Arrangement) -> ProcessMesh:
    """Form the groups of all replicas; every rank of `world` calls this."""
    require(arrangement.size == world.size, "ranks of the arrangement", arrangement.size, f"{world.size}, as there are")
    mine: tuple[Group, int] | None = None
    for index in range(len(arrangement.replicas)):
        ranks = arrangement.ranks_of(index)
        group = world.subgroup(ranks)
        if world.rank in ranks and group is not None:
            group.traffic = world.traffic
            mine = group, index
    assert mine is not None
    return ProcessMesh(world, mine[0], arrangement, mine[1], has_same_generators=world.has_same_generators())
