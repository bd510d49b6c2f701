"""Ranks as threads of this process, joined by Gloo and a mesh of sockets: a world that starts in milliseconds.

Random generators are shared by the threads, so what draws random numbers is tested with processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.comm.step_timing import StepTimer
from support.stores import memory_store

T = TypeVar("T")
SECONDS = 60.0


@dataclass
class ThreadGroup(Group):
    """A group whose subgroups are made of threads, too."""

    store: Any = None
    made: list[Group] = field(default_factory=list)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        if self.rank not in ranks:
            return None
        if len(ranks) == self.size:
            return self
        group = thread_group(list(ranks).index(self.rank), len(ranks), self.store.under(str(ranks)))
        self.made.append(group)
        return group


def thread_group(rank: int, size: int, store: Any) -> ThreadGroup:
    """Rank `rank` of `size`, each of which calls this in a thread of its own."""
    nodes = [f"n{i}" for i in range(size)]
    device = torch.device("cpu")
    group = ThreadGroup(rank=rank, size=size, device=device, nodes=nodes, timer=StepTimer(device), store=store)
    if size > 1:
        group.process_group = _gloo(rank, size, store)
        group.mesh, group.reports = _mesh(rank, nodes, store), _mesh(rank, nodes, store.under("reports"))
    return group


def _mesh(rank: int, nodes: list[str], store: Any) -> Mesh:
    return join_mesh(rank=rank, nodes=nodes, store=store, address="127.0.0.1", patience=SECONDS, longest_wait=SECONDS)


def leave(group: ThreadGroup) -> None:
    """Close what `thread_group` opened."""
    for one in (*group.made, group):
        for mesh in filter(None, (one.mesh, one.reports)):
            mesh.close()
        _known().pop(one.process_group, None)
        one.process_group = None  # its three threads end now, not when the model that knows the group is collected


def together(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` returns on every rank of a new world."""
    with world(size) as run:
        return run(work)


@contextlib.contextmanager
def world(size: int) -> Iterator[Callable[[Callable[[Group], T]], list[T]]]:
    """A world of `size` threads: call it with what every rank has to do; the first rank's error is raised."""
    store = memory_store()
    with ThreadPoolExecutor(size) as pool:
        groups = [future.result(SECONDS) for future in [pool.submit(thread_group, i, size, store) for i in range(size)]]

        def run(work: Callable[[Group], T]) -> list[T]:
            futures = [pool.submit(work, group) for group in groups]
            for future in as_completed(futures, SECONDS):
                if future.exception() is not None:
                    break  # the others wait for this one, until they run into their time limit
            return [future.result(SECONDS) for future in sorted(futures, key=lambda one: not _failed(one))]

        try:
            yield run
        finally:
            for group in groups:
                leave(group)


def _failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _gloo(rank: int, size: int, store: Any) -> Any:
    """A process group of Gloo that this process may have several of."""
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=SECONDS))  # type: ignore[attr-defined]
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)  # type: ignore[attr-defined]
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    _known()[group] = ("gloo", store)
    return group


def _known() -> dict[Any, Any]:
    """Where torch.distributed looks for the backend of a group."""
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return known
