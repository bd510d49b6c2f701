"""A process group for PyTorch's functions whose operations another thread can abort (`abortable`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.abortable import AbortableGloo, Pending
from evener.comm.staged_gloo import BACKEND, StagedGloo


class _Awaited(dist.Work):
    """An operation under way."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, *_timeout: Any) -> bool:
        """Return when the operation has ended. Raises its error."""
        self._pending.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of its tensors."""
        return self._pending


class AbortableProcessGroup(dist.ProcessGroup):
    """The process group of `rank` among `size` ranks, with the methods that PyTorch calls."""

    def __init__(self, rank: int, size: int, operations: AbortableGloo) -> None:
        cast(Any, super()).__init__(rank, size)  # the constructor for those written in Python
        self.operations = operations
        make_known_to_torch(self, self.getBackendName())

    def getBackendName(self) -> str:
        """Return the name of the backend that PyTorch knows."""
        return BACKEND if self.operations.is_staged else "gloo"

    def alltoall_base(self, *arguments: Any, **named: Any) -> Any:
        """Start to exchange blocks with every peer."""
        return self._begun("alltoall_base", arguments, named)

    def allreduce(self, *arguments: Any, **named: Any) -> Any:
        """Start to sum tensors over all ranks, in place."""
        return self._begun("allreduce", arguments, named)

    def broadcast(self, *arguments: Any, **named: Any) -> Any:
        """Start to copy one rank's tensors to all, in place."""
        return self._begun("broadcast", arguments, named)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Start to send a message to one peer."""
        return _Awaited(self.operations.message(lambda gloo: gloo.send(tensors, to, tag), tensors, ("to", to, tag)))

    def allgather(self, *arguments: Any, **named: Any) -> Any:
        """Start to copy every rank's tensors to all."""
        return self._begun("allgather", arguments, named)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        """Start to receive a message from one peer."""
        lane = ("from", sender, tag)
        return _Awaited(self.operations.message(lambda gloo: gloo.recv(tensors, sender, tag), tensors, lane))

    def _begun(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Awaited:
        """Start a collective of Gloo by its name; its tensors are among the arguments."""
        return _Awaited(self.operations.begin(lambda gloo: getattr(gloo, name)(*arguments, **named), arguments))


def register_staged() -> None:
    """Let PyTorch make process groups of the backend `staged`: abortable ones, also for tensors of accelerators."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _staged_group, devices=["cpu"])


def _staged_group(store: Any, rank: int, size: int, seconds: timedelta) -> AbortableProcessGroup:
    gloo = StagedGloo(dist.ProcessGroupGloo(store, rank, size, seconds))
    return AbortableProcessGroup(rank, size, AbortableGloo(gloo))


def make_known_to_torch(group: dist.ProcessGroup, backend: str) -> None:
    """Enter a group that is written in Python into PyTorch's tables of backends and ranks.

    PyTorch reads both for its log when an operation fails. Without the ranks its own error would hide the first one.
    """
    torch_world: Any = dist.distributed_c10d._world
    torch_world.pg_map[group] = (backend, None)
    torch_world.pg_group_ranks[group] = {dist.get_rank() if dist.is_initialized() else group.rank(): group.rank()}


def forget_in_torch(group: dist.ProcessGroup) -> None:
    """Remove a group of `make_known_to_torch`, if it is still there."""
    torch_world: Any = dist.distributed_c10d._world
    torch_world.pg_map.pop(group, None)
    torch_world.pg_group_ranks.pop(group, None)
