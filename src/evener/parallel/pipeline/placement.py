"""Placement of stages: all in threads of this process, or one in this process and the others in other processes.

Everything that differs between the two is here: which stages run here, and how messages and tensors are sent.

    send(tensor, to, kind)            starts to send; the stage computes on meanwhile
    expect(value, sender, kind)       starts to receive, and returns a function
    expected()                        waits for the tensor

Between two stages, tensors of one kind arrive in the order in which they were sent. Both sides know order, shapes and
dtypes from the model's graph, so only the numbers are sent.
"""

from __future__ import annotations

import queue
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group
from evener.parallel.pipeline.stage_layout import BoundaryTensor
from evener.records.errors import require
from evener.system import accelerators
from evener.tracer.ir import TorchModes

T = TypeVar("T")
Payload = Literal["activations", "gradients"]
_TAGS: dict[Payload, int] = {"activations": 0, "gradients": 1}
_IN_FLIGHT = 2
"""Largest number of unfinished sends to one stage; each holds its tensor in memory."""


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The devices and ranks that can run stages.

    Attributes:
        group: The ranks, one per stage; None if all stages are in this process.
        devices: Devices of this process: that of its rank, or one per stage.
        replicas: Ranks of each replica, or the numbers of its devices.
        are_lanes: Whether the replicas are lanes of one model, whose ranks divide layers (`sharded_stage.py`).
    """

    group: Group | None
    devices: tuple[torch.device, ...]
    replicas: tuple[tuple[int, ...], ...]
    are_lanes: bool = False

    @property
    def own_replica(self) -> int:
        """Number of the replica that this process belongs to."""
        return 0 if self.group is None else next(i for i, row in enumerate(self.replicas) if self.group.rank in row)

    @property
    def speed(self) -> float:
        """Relative speed to which this process is slowed down on purpose."""
        return 1.0 if self.group is None else self.group.timer.pace.speed

    def gather(self, message: bytes) -> list[bytes]:
        """Gather the messages of all processes."""
        return [message] if self.group is None else self.group.all_gather_bytes(message)

    def gather_replica(self, message: bytes) -> list[bytes]:
        """Gather the messages of the processes of this replica. All processes call this."""
        rows = self.gather(message)
        return rows if self.group is None else [rows[rank] for rank in sorted(self.replicas[self.own_replica])]

    def gather_norms(self, norm: Tensor) -> Tensor:
        """Gather the numbers of the processes that hold one model with this one. All processes call this."""
        if self.group is None:
            return norm.unsqueeze(0)
        rows = self.group.all_gather(norm, "norms")
        return rows if self.are_lanes else torch.stack([rows[rank] for rank in sorted(self.replicas[self.own_replica])])


def place_stages(
    on: Group | Sequence[torch.device] | None,
    stages: int | Sequence[str] | None,
    replicas: Sequence[Sequence[int]] | None,
) -> StagePlacement:
    """Return the placement of `stages` (their number, or names of all but the first).

    Raises InvalidValue if they do not fit the devices, or `replicas` do not contain every rank once.
    """
    number = stages if stages is None or isinstance(stages, int) else len(stages) + 1
    require(number is None or number > 0, "stages", stages, "positive")
    group = on if isinstance(on, Group) and on.size > 1 else None
    devices = _local_devices(number) if on is None else (on.device,) if isinstance(on, Group) else tuple(on)
    size = group.size if group else len(devices)
    rows = (tuple(range(size)),) if replicas is None else tuple(tuple(ranks) for ranks in replicas)
    every = sorted(rank for ranks in rows for rank in ranks)
    require(every == list(range(size)) and all(rows), "replicas", replicas, f"each rank from 0 to {size - 1} once")
    require(group is not None or len(rows) == 1, "replicas", replicas, "a single one within one process")
    for ranks in rows:
        allowed = f"{len(ranks)}, one on every device or rank of a replica"
        require(number in (None, len(ranks)), "stages", stages, allowed)
    return StagePlacement(group=group, devices=devices, replicas=rows)


def _local_devices(number: int | None) -> tuple[torch.device, ...]:
    """Return all accelerators, or as many as there are stages; without one, the CPU for every stage."""
    here = tuple(torch.device(name) for name in accelerators.names())
    return here[:number] if here else (torch.device("cpu"),) * (number or 1)


class ProcessP2P:
    """Sends tensors between processes, one per stage, on the `ranks` of `group`."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        self._leaving: dict[tuple[int, Payload], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, to: int, kind: Payload) -> None:
        """Send `tensor`, which must not change afterwards; wait only if many sends are unfinished."""
        leaving = self._leaving[to, kind]
        if len(leaving) == _IN_FLIGHT:
            leaving.popleft()[0].wait()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._group.process_group, group_dst=self._ranks[to], tag=_TAGS[kind])
        assert work is not None
        leaving.append((work, tensor))
        self._group.traffic.count(kind, tensor.nbytes, 0)

    def expect(self, value: BoundaryTensor, sender: int, kind: Payload) -> Callable[[], Tensor]:
        """Start to receive a tensor like `value` into new memory; the returned function waits for it."""
        tensor = value.empty(self._group.device)
        work = dist.irecv(tensor, group=self._group.process_group, group_src=self._ranks[sender], tag=_TAGS[kind])
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            self._group.traffic.count(kind, 0, tensor.nbytes)
            return tensor

        return wait

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()


class PeerStageFailed(Exception):
    """Raised if another stage of this process has failed; the other stage's error is the one to show."""


Boxes: TypeAlias = Mapping[tuple[int, int, Payload], queue.SimpleQueue[Tensor | None]]
"""Queues of tensors between the threads of one process, by (from, to, kind); None stops a waiting thread."""


class ThreadP2P:
    """Sends tensors between threads of one process, one per stage, with the methods of ProcessP2P."""

    def __init__(self, boxes: Boxes, devices: Mapping[int, torch.device], stage: int) -> None:
        self._boxes, self._devices, self._stage = boxes, devices, stage

    def send(self, tensor: Tensor, to: int, kind: Payload) -> None:
        """Copy `tensor` to the device of stage `to`."""
        self._boxes[self._stage, to, kind].put(tensor.detach().to(self._devices[to], non_blocking=True))

    def expect(self, value: BoundaryTensor, sender: int, kind: Payload) -> Callable[[], Tensor]:  # noqa: ARG002
        """Return a function that waits for the tensor of stage `sender`."""

        def wait() -> Tensor:
            tensor = self._boxes[sender, self._stage, kind].get()
            if tensor is None:
                raise PeerStageFailed
            return tensor

        return wait

    def finish(self) -> None:
        """Return at once, as sends have finished."""


P2P: TypeAlias = ProcessP2P | ThreadP2P
"""One stage's connection to the others."""


class StageHost:
    """Runs one stage of its replica in this process, or all stages.

    Args:
        placement: The placement of all processes.
        ranks: Ranks of this replica's stages, in order, or the numbers of their devices.
        receivers: All ranks that compute the same batch, the broadcasting one first; by default `ranks`.

    Attributes:
        devices: Devices of this process's stages, by number of the stage.
        timer: The timer of the process, if it has one.
    """

    def __init__(self, placement: StagePlacement, ranks: Sequence[int], receivers: Sequence[int] = ()) -> None:
        group = self._group = placement.group
        self._ranks, self._receivers = ranks, receivers or ranks
        self.timer = None if group is None else group.timer
        if group is None:
            self.devices = {stage: placement.devices[number] for stage, number in enumerate(ranks)}
        else:
            self.devices = {ranks.index(group.rank): group.device}

    def broadcast(self, message: bytes) -> bytes:
        """Broadcast the `message` of the process that runs the first stage, or the first lane's first stage."""
        if self._group is None:
            return message
        first, *others = self._receivers
        assert self._group.mesh is not None
        if self._group.rank != first:
            return self._group.mesh.receive_from(first)
        for rank in others:
            self._group.mesh.send_to(rank, message)
        return message

    def run(self, work: Callable[[int, P2P], T]) -> dict[int, T]:
        """Run `work` for every stage of this process at the same time; return the results. The first error ends all."""
        if self._group is not None:
            return {stage: work(stage, ProcessP2P(self._group, self._ranks)) for stage in self.devices}
        boxes: Boxes = {path: queue.SimpleQueue() for path in product(self.devices, self.devices, _TAGS)}
        if len(self.devices) == 1:
            return {0: work(0, ThreadP2P(boxes, self.devices, 0))}
        modes = [TorchModes.now(device_type) for device_type in {d.type for d in self.devices.values()}]

        def one(stage: int) -> T:
            try:
                with _computing_on(self.devices[stage], modes):
                    return work(stage, ThreadP2P(boxes, self.devices, stage))
            except BaseException:
                for box in boxes.values():
                    box.put(None)
                raise

        with ThreadPoolExecutor(len(self.devices), thread_name_prefix="evener-stage") as pool:
            futures = [pool.submit(one, stage) for stage in self.devices]
        errors = [future.exception() for future in futures]
        first = next((error for error in errors if error is not None and not isinstance(error, PeerStageFailed)), None)
        if first is not None:
            raise first
        return {stage: future.result() for stage, future in zip(self.devices, futures, strict=True)}


@contextmanager
def _computing_on(device: torch.device, modes: Sequence[TorchModes]) -> Iterator[None]:
    """Compute on `device` in this thread, in the modes of the thread that began the step."""
    with ExitStack() as stack:
        stack.enter_context(accelerators.used(device))
        for one in modes:
            stack.enter_context(one.applied())
        yield
