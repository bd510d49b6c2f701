"""A rank's place among the others: with whom it holds one model together, and with whom it shares the samples."""

from __future__ import annotations

from dataclasses import dataclass

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.records.errors import require


@dataclass(frozen=True)
class ProcessMesh:
    """This rank in an arranged run.

    Attributes:
        world: all ranks.
        group: the ranks of this one's replica, which together hold one model.
        arrangement: of all ranks.
        index: of this rank's replica.
    """

    world: Group
    group: Group
    arrangement: Arrangement
    index: int

    @property
    def replica(self) -> Replica:
        """The own replica."""
        return self.arrangement.replicas[self.index]


def form_process_mesh(world: Group, arrangement: Arrangement) -> ProcessMesh:
    """Form the groups of all replicas; every rank of `world` calls this."""
    require(arrangement.size == world.size, "ranks of the arrangement", arrangement.size, f"{world.size}, as there are")
    own: tuple[Group, int] | None = None
    for index in range(len(arrangement.replicas)):
        ranks = arrangement.ranks_of(index)
        group = world.subgroup(ranks)
        if world.rank in ranks and group is not None:
            group.traffic = world.traffic
            own = group, index
    assert own is not None
    return ProcessMesh(world=world, group=own[0], arrangement=arrangement, index=own[1])
