"""Creation and end of the group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from evener.comm.abortable import GlooPlace
from evener.comm.abortable_group import AbortableProcessGroup, register_staged
from evener.comm.group import Group
from evener.comm.mesh_joining import join_meshes
from evener.comm.signed_store import SignedStore
from evener.comm.staged_gloo import BACKEND
from evener.comm.step_timing import StepTimer
from evener.records.errors import NodeLost
from evener.system import accelerators
from evener.system.host import require_posix


def join_group(
    *,
    rank: int,
    nodes: Sequence[str],
    device: torch.device,
    store: SignedStore | None,
    patience: float,
    longest_wait: float = 1800.0,
    backend: str = "gloo",
    address: str = "127.0.0.1",
    timer: StepTimer | None = None,
) -> Group:
    """Join the ranks on `nodes`, one per rank; a single rank has no process group.

    Args:
        rank: of this process.
        nodes: name of every rank's node.
        device: of this rank.
        store: rendezvous of the ranks; None only for a single rank.
        patience: seconds within which all ranks have to join, at least 30.
        longest_wait: timeout of a collective in seconds; a slow rank is not lost.
        backend: for tensors: `gloo` on processors, `staged` if some are on accelerators, or `nccl`.
        address: of this machine, at which the other ranks reach it.
        timer: this rank's clock; by default one of full speed.

    Raises:
        InvalidInput: there are several ranks, and this system has no POSIX.
    """
    accelerators.use(device)
    timer = timer or StepTimer(device)
    patience = max(patience, 30.0)
    group = Group(rank=rank, size=len(nodes), device=device, nodes=list(nodes), timer=timer)
    if group.size > 1:
        require_posix("a run whose ranks work together")
        assert store is not None
        limit = timedelta(seconds=longest_wait)
        # NCCL and its like watch the store by a thread of their own, which cannot call Python
        place = store if backend in ("gloo", BACKEND) else store.inner
        register_staged()
        dist.init_process_group(backend, store=place, rank=rank, world_size=group.size, timeout=limit)
        group.store = store
        group.process_group = world = dist.group.WORLD
        if isinstance(world, AbortableProcessGroup):
            group.sums = world.operations
            group.sums.place = GlooPlace(
                store=store.under(BACKEND), rank=rank, size=group.size, longest_wait=longest_wait, is_staged=True
            )
        group.mesh, group.reports = join_meshes(
            rank=rank, nodes=group.nodes, store=store, address=address, patience=patience, longest_wait=longest_wait
        )
    return group


def leave_group() -> None:
    """Leave all process groups of this process, if it is in any; all messages between ranks have been waited for."""
    if dist.is_initialized():
        world = dist.group.WORLD
        dist.destroy_process_group()
        if isinstance(world, AbortableProcessGroup):
            world.operations.abort(NodeLost("the group is over"))
            world.operations.let_go()
