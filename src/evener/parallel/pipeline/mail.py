"""How tensors get from stage to stage: between processes, or between threads of one process.

    send(tensor, to, kind)            returns at once; the tensor travels while the stage computes on
    expect(value, sender, kind)       says that one will come, so that it can travel at any time from now on
    expected()                        waits for it

Between two stages, tensors of one kind arrive in the order in which they were sent; both sides know that order, and
shapes and dtypes, from the model's graph, so nothing but the numbers travels.
"""

from __future__ import annotations

import queue
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group
from evener.parallel.pipeline.partition import BoundaryTensor

Mail = Literal["activations", "gradients"]
_TAGS: dict[Mail, int] = {"activations": 0, "gradients": 1}
_UNDER_WAY = 2
"""Tensors that may be on their way to one stage; each is held in memory until it has left."""


class Post(Protocol):
    """One stage's way to the others."""

    def send(self, tensor: Tensor, to: int, kind: Mail) -> None:
        """Send `tensor` to stage `to`; it must not be changed afterwards."""

    def expect(self, value: BoundaryTensor, sender: int, kind: Mail) -> Callable[[], Tensor]:
        """Get ready for a tensor like `value` from stage `sender`; call what comes back to wait for it."""

    def finish(self) -> None:
        """Return when everything sent has left."""


class ProcessPost:
    """Between processes, one a stage.

    Args:
        group: all ranks.
        ranks: of the stages, in order.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        gloo = dist.get_backend(group.process_group) == "gloo"
        self._wire = torch.device("cpu") if gloo else group.device
        self._leaving: dict[tuple[int, Mail], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, to: int, kind: Mail) -> None:
        """Send `tensor`; waits only if many are still on their way there."""
        leaving = self._leaving[to, kind]
        if len(leaving) == _UNDER_WAY:
            leaving.popleft()[0].wait()
        tensor = tensor.detach().to(self._wire).contiguous()
        work = dist.isend(tensor, group=self._group.process_group, group_dst=self._ranks[to], tag=_TAGS[kind])
        assert work is not None
        leaving.append((work, tensor))
        self._group.traffic.count(kind, tensor.nbytes, 0)

    def expect(self, value: BoundaryTensor, sender: int, kind: Mail) -> Callable[[], Tensor]:
        """Receive into new memory."""
        tensor = value.empty(self._wire)
        work = dist.irecv(tensor, group=self._group.process_group, group_src=self._ranks[sender], tag=_TAGS[kind])
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            self._group.traffic.count(kind, 0, tensor.nbytes)
            return tensor.to(self._group.device)

        return wait

    def finish(self) -> None:
        """Wait for all sends."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()


class Abandoned(Exception):
    """Another stage of this process has failed; its error is the one to show."""


class Office:
    """Where the threads of one process leave tensors for each other.

    Args:
        devices: of the stages, in order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        stages = range(len(devices))
        self._boxes: dict[tuple[int, int, Mail], queue.SimpleQueue[Tensor | None]] = {
            way: queue.SimpleQueue() for way in product(stages, stages, _TAGS)
        }

    def box(self, sender: int, to: int, kind: Mail) -> queue.SimpleQueue[Tensor | None]:
        """Tensors from stage `sender` to stage `to`."""
        return self._boxes[sender, to, kind]

    def close(self) -> None:
        """Let everybody who waits, or will, give up."""
        for box in self._boxes.values():
            box.put(None)


class ThreadPost:
    """Between threads of one process, one a stage.

    Args:
        office: of all stages.
        stage: number of this one.
    """

    def __init__(self, office: Office, stage: int) -> None:
        self._office, self._stage = office, stage

    def send(self, tensor: Tensor, to: int, kind: Mail) -> None:
        """Copy `tensor` to the device of stage `to`."""
        self._office.box(self._stage, to, kind).put(tensor.detach().to(self._office.devices[to], non_blocking=True))

    def expect(self, value: BoundaryTensor, sender: int, kind: Mail) -> Callable[[], Tensor]:  # noqa: ARG002
        """What stage `sender` will leave, or has left."""

        def wait() -> Tensor:
            tensor = self._office.box(sender, self._stage, kind).get()
            if tensor is None:
                raise Abandoned
            return tensor

        return wait

    def finish(self) -> None:
        """Nothing to wait for."""
