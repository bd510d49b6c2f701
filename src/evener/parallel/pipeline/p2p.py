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
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group
from evener.parallel.pipeline.partition import BoundaryTensor

Payload = Literal["activations", "gradients"]
_TAGS: dict[Payload, int] = {"activations": 0, "gradients": 1}
_IN_FLIGHT = 2
"""Tensors that may be on their way to one stage; each is held in memory until it has left."""


class ProcessP2P:
    """Between processes, one a stage.

    Args:
        group: all ranks.
        ranks: of the stages, in order.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        gloo = dist.get_backend(group.process_group) == "gloo"
        self._wire = torch.device("cpu") if gloo else group.device
        self._leaving: dict[tuple[int, Payload], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, to: int, kind: Payload) -> None:
        """Send `tensor`, which must not be changed afterwards; waits only if many are still on their way there."""
        leaving = self._leaving[to, kind]
        if len(leaving) == _IN_FLIGHT:
            leaving.popleft()[0].wait()
        tensor = tensor.detach().to(self._wire).contiguous()
        work = dist.isend(tensor, group=self._group.process_group, group_dst=self._ranks[to], tag=_TAGS[kind])
        assert work is not None
        leaving.append((work, tensor))
        self._group.traffic.count(kind, tensor.nbytes, 0)

    def expect(self, value: BoundaryTensor, sender: int, kind: Payload) -> Callable[[], Tensor]:
        """Get ready for a tensor like `value`, in new memory; call what comes back to wait for it."""
        tensor = value.empty(self._wire)
        work = dist.irecv(tensor, group=self._group.process_group, group_src=self._ranks[sender], tag=_TAGS[kind])
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            self._group.traffic.count(kind, 0, tensor.nbytes)
            return tensor.to(self._group.device)

        return wait

    def finish(self) -> None:
        """Return when everything sent has left."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()


class PeerStageFailed(Exception):
    """Another stage of this process has failed; its error is the one to show."""


class Mailboxes:
    """Where the threads of one process leave tensors for each other.

    Args:
        devices: of the stages, in order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        ways = product(range(len(devices)), range(len(devices)), _TAGS)
        self._boxes: dict[tuple[int, int, Payload], queue.SimpleQueue[Tensor | None]] = {
            way: queue.SimpleQueue() for way in ways
        }

    def box(self, sender: int, to: int, kind: Payload) -> queue.SimpleQueue[Tensor | None]:
        """Tensors from stage `sender` to stage `to`."""
        return self._boxes[sender, to, kind]

    def close(self) -> None:
        """Let everybody who waits, or will, give up."""
        for box in self._boxes.values():
            box.put(None)


class ThreadP2P:
    """Between threads of one process, one a stage; the methods are those of ProcessP2P.

    Args:
        mailboxes: of all stages.
        stage: number of this one.
    """

    def __init__(self, mailboxes: Mailboxes, stage: int) -> None:
        self._mailboxes, self._stage = mailboxes, stage

    def send(self, tensor: Tensor, to: int, kind: Payload) -> None:
        """Copy `tensor` to the device of stage `to`."""
        copied = tensor.detach().to(self._mailboxes.devices[to], non_blocking=True)
        self._mailboxes.box(self._stage, to, kind).put(copied)

    def expect(self, value: BoundaryTensor, sender: int, kind: Payload) -> Callable[[], Tensor]:  # noqa: ARG002
        """What stage `sender` will leave, or has left."""

        def wait() -> Tensor:
            tensor = self._mailboxes.box(sender, self._stage, kind).get()
            if tensor is None:
                raise PeerStageFailed
            return tensor

        return wait

    def finish(self) -> None:
        """Nothing to wait for."""


P2P: TypeAlias = ProcessP2P | ThreadP2P
"""One stage's way to the others."""
