"""Creation and end of the group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from evener.comm.group import Group
from evener.comm.mesh_joining import join_meshes
from evener.comm.signed_store import SignedStore
from evener.comm.step_timing import StepTimer
from evener.records.errors import InvalidInput
from evener.system import accelerators


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
        backend: `nccl` or `gloo` for tensors.
        address: of this machine, at which the other ranks reach it.
        timer: this rank's clock; by default one of full speed.

    Raises:
        InvalidInput: there are several ranks, and Gloo does not take tensors of `device`.
    """
    if len(nodes) > 1 and backend == "gloo" and not accelerators.capabilities(device).goes_with_gloo:
        raise InvalidInput(
            f"several nodes cannot exchange tensors of {device} yet: train on one of them, or with --devices cpu"
        )
    accelerators.use(device)
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
