"""Where a pipeline's stages run: threads of this process, or one stage in this process and the others elsewhere.

Everything that differs between the two is here: which stages are this process's own, how tensors travel, how a step is
announced, and what all have to agree upon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.errors import InvalidInput
from evener.parallel.pipeline.layout import Layout
from evener.parallel.pipeline.mail import Abandoned, Office, Post, ProcessPost, ThreadPost
from evener.parallel.pipeline.places import Places
from evener.parallel.pipeline.shared import ProcessShared, Shared, ThreadShared
from evener.parallel.pipeline.stage_modules import StageModules
from evener.tracer.torch_modes import TorchModes

T = TypeVar("T")


class Site(Protocol):
    """This process's place in a pipeline."""

    @property
    def devices(self) -> Mapping[int, torch.device]:
        """Of the stages that this process runs, by number."""

    @property
    def timer(self) -> StepTimer | None:
        """Of the process, if it keeps one."""

    def tell(self, message: bytes) -> bytes:
        """The `message` of the process that runs the first stage."""

    def gather(self, message: bytes) -> list[bytes]:
        """Every process's message."""

    def shared(self, parts: Mapping[int, StageModules]) -> Shared:
        """What the stages' parts have in common with others."""

    def run(self, work: Callable[[int, Post], T]) -> dict[int, T]:
        """What `work` returns for every stage of this process, all stages at the same time."""


class ThreadSite:
    """All stages in this process, a thread each.

    Args:
        devices: of the stages, in order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = dict(enumerate(devices))
        self.timer = None

    def tell(self, message: bytes) -> bytes:
        """There is nobody to tell."""
        return message

    def gather(self, message: bytes) -> list[bytes]:
        """There is nobody else."""
        return [message]

    def shared(self, parts: Mapping[int, StageModules]) -> Shared:
        """Tied weights of stages of this process."""
        return ThreadShared(list(parts.values()))

    def run(self, work: Callable[[int, Post], T]) -> dict[int, T]:
        """Run the stages' work in threads; the first error of any ends all."""
        office = Office(list(self.devices.values()))
        if len(self.devices) == 1:
            return {0: work(0, ThreadPost(office, 0))}
        contexts = [TorchModes.now(device_type) for device_type in {d.type for d in self.devices.values()}]

        def one(stage: int) -> T:
            try:
                with _current(self.devices[stage], contexts):
                    return work(stage, ThreadPost(office, stage))
            except BaseException:
                office.close()
                raise

        with ThreadPoolExecutor(len(self.devices), thread_name_prefix="evener-stage") as pool:
            futures = [pool.submit(one, stage) for stage in self.devices]
        errors = [future.exception() for future in futures]
        first = next((error for error in errors if error is not None and not isinstance(error, Abandoned)), None)
        if first is not None:
            raise first
        return {stage: future.result() for stage, future in zip(self.devices, futures, strict=True)}


class ProcessSite:
    """One stage in this process, a process each for the others and for those of other replicas.

    Args:
        group: all ranks.
        layouts: of all replicas.
        replica: of this rank.
    """

    def __init__(self, group: Group, layouts: Sequence[Layout], replica: int) -> None:
        self._group, self._layouts = group, layouts
        self._layout = layouts[replica]
        self._stage = self._layout.ranks.index(group.rank)
        self.devices = {self._stage: group.device}
        self.timer = group.timer

    def tell(self, message: bytes) -> bytes:
        """Passed on by the first stage's rank to those of its replica."""
        first, *others = self._layout.ranks
        assert self._group.mesh is not None
        if self._group.rank != first:
            return self._group.mesh.receive_from(first)
        for rank in others:
            self._group.mesh.send_to(rank, message)
        return message

    def gather(self, message: bytes) -> list[bytes]:
        """In order of ranks."""
        return self._group.all_gather_bytes(message)

    def shared(self, parts: Mapping[int, StageModules]) -> Shared:
        """Tied weights, and replicas."""
        return ProcessShared(self._group, self._layouts, parts[self._stage])

    def run(self, work: Callable[[int, Post], T]) -> dict[int, T]:
        """Run the one stage."""
        return {self._stage: work(self._stage, ProcessPost(self._group, self._layout.ranks))}


def site(where: Places, layouts: Sequence[Layout]) -> Site:
    """This process's, for `layouts` of all replicas."""
    if where.group is not None:
        return ProcessSite(where.group, layouts, where.own_replica)
    return ThreadSite([where.devices[number] for number in layouts[0].ranks])


def agree_upon(site: Site, what: str, value: str) -> None:
    """Raise InvalidInput unless every process has the same `value`."""
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    for rank, other in enumerate(site.gather(digest)):
        if other != digest:
            raise InvalidInput(f"{what} is not the same on all ranks: this one and rank {rank} differ")


@contextmanager
def _current(device: torch.device, contexts: Sequence[TorchModes]) -> Iterator[None]:
    """Inside, this thread computes on `device`, in the state of the thread that began the step."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        for context in contexts:
            stack.enter_context(context.applied())
        yield
