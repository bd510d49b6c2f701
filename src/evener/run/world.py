"""All ranks of a run, joined: what every rank's program begins with."""

from __future__ import annotations

from evener.comm.group import Group, join_group
from evener.comm.step_timing import StepTimer
from evener.launch.rank_environment import RankEnvironment


def join_world(seat: RankEnvironment, backend: str | None = None) -> Group:
    """The group of all ranks, at the speed of this rank's node.

    Args:
        seat: of this rank.
        backend: `nccl` or `gloo` for tensors; by default what suits the devices.

    Raises:
        NodeLost: a rank does not come.
    """
    return join_group(
        rank=seat.rank,
        nodes=seat.names,
        device=seat.device,
        store=seat.store,
        patience=seat.patience,
        address=seat.address,
        backend=backend or seat.backend,
        timer=StepTimer(seat.device, seat.node.speed_at(0)),
    )
