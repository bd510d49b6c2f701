"""A process group as PyTorch's functions call it, each of whose operations another thread can end (`abortable`)."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.abortable import AbortableGloo, Pending


class _Awaited(dist.Work):
    """An operation that is under way."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, *_timeout: Any) -> bool:
        """Return when it has ended. Raises why it failed, or was given up."""
        self._pending.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Of its tensors."""
        return self._pending


class AbortableProcessGroup(dist.ProcessGroup):
    """The process group of rank `rank` of `size`; methods are those that PyTorch calls, with what it gives them."""

    def __init__(self, rank: int, size: int, operations: AbortableGloo) -> None:
        cast(Any, super()).__init__(rank, size)  # the constructor for those written in Python
        self.operations = operations
        groups_known_to_torch()[self] = (dist.Backend.GLOO, None)

    def getBackendName(self) -> str:
        """Of the one that PyTorch has."""
        return "gloo"

    def alltoall_base(self, *arguments: Any, **named: Any) -> Any:
        """Blocks for every peer."""
        return self._begun("alltoall_base", arguments, named)

    def allreduce(self, *arguments: Any, **named: Any) -> Any:
        """The sum over all ranks, in place."""
        return self._begun("allreduce", arguments, named)

    def broadcast(self, *arguments: Any, **named: Any) -> Any:
        """What one rank has, in place."""
        return self._begun("broadcast", arguments, named)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """A message to one peer."""
        return _Awaited(self.operations.message(lambda gloo: gloo.send(tensors, to, tag), tensors, ("to", to, tag)))

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        """A message of one peer."""
        way = ("from", sender, tag)
        return _Awaited(self.operations.message(lambda gloo: gloo.recv(tensors, sender, tag), tensors, way))

    def _begun(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Awaited:
        """A collective of the group of Gloo's, by name; its tensors are among the arguments."""
        return _Awaited(self.operations.begin(lambda gloo: getattr(gloo, name)(*arguments, **named), arguments))


def groups_known_to_torch() -> dict[Any, Any]:
    """Where PyTorch looks for the backend of a group: one that is written in Python has to be in it."""
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return known
