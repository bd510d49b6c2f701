"""Ranks come together as a group, and leave it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from evener.comm.group import Group
from evener.comm.mesh_joining import join_meshes
from evener.comm.signed_store import SignedStore
from evener.comm.step_timing import StepTimer


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
    """Join the ranks on `nodes` (one a rank); with a single one no process group is made.

    Args:
        rank: of this process.
        nodes: name of every rank's node.
        device: that this rank computes on.
        store: where the ranks find each other; None only for a single rank.
        patience: seconds within which all have to come together, and not less than 30.
        longest_wait: seconds that a collective may take: slow is not dead.
        backend: `nccl` or `gloo` for tensors.
        address: of this machine, at which the other ranks reach it.
        timer: this rank's clock; by default one of the device's own speed.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timer = timer or StepTimer(device)
    patience = max(patience, 30.0)
    group = Group(rank=rank, size=len(nodes), device=device, nodes=list(nodes), timer=timer)
    if group.size > 1:
        assert store is not None
        limit = timedelta(seconds=longest_wait)
        place = store.inner if backend == "nccl" else store  # a thread of NCCL's watches the store, without Python
        dist.init_process_group(backend, store=place, rank=rank, world_size=group.size, timeout=limit)
        group.store = store
        group.process_group = dist.group.WORLD
        group.mesh, group.reports = join_meshes(
            rank=rank, nodes=group.nodes, store=store, address=address, patience=patience, longest_wait=longest_wait
        )
    return group


def leave_group() -> None:
    """Leave all process groups of this process, if it is in any."""
    if dist.is_initialized():
        dist.destroy_process_group()
