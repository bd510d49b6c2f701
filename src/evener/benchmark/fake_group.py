"""A process group of fake peers: a rank performs its part of a step in it alone, as if all others were there.

Nothing is sent. What would come from the others is zeros, so that the rank computes what it would compute; but of
statistics, where zeros would be refused as those of no samples, any others. A trace notes every exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.benchmark.replay_profile import EventTrace
from evener.comm.group import Group, Traffic
from evener.comm.step_timing import StepTimer
from evener.oracle.replay import ExchangeKind

_ANY_COUNT = 2.0
"""As statistics that come from the others: BatchNorm refuses a single value a channel."""


class _Sent(dist.Work):
    """Something that was sent to nobody; waiting for it ends at once."""

    def __init__(
        self,
        peers: FakeProcessGroup,
        number: int | None,
        result: Any,
        empty: Tensor | None = None,
        filling: float = 0.0,
    ) -> None:
        super().__init__()
        self._peers, self._number, self._result = peers, number, result
        self._empty, self._filling = empty, filling

    def wait(self, *_timeout: Any) -> bool:
        """The result is needed now."""
        if self._number is not None:
            self._peers.trace.need(self._number)
        if self._empty is not None:
            with self._peers.trace.stopped():
                self._empty.fill_(self._filling)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """What has the result already."""
        devices: list[int | str | torch.device] = [
            tensor.device for tensor in self._result if isinstance(tensor, Tensor) and tensor.is_cuda
        ]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future


class FakeProcessGroup(dist.ProcessGroup):
    """The process group of a rank whose peers are fake; methods are those that PyTorch calls.

    Args:
        ranks: of the run, that are in the group.
        rank: of this process among them.
        trace: that notes every exchange.
    """

    def __init__(self, ranks: Sequence[int], rank: int, trace: EventTrace) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the constructor for those written in Python
        self.ranks, self.trace = tuple(ranks), trace

    def getBackendName(self) -> str:
        """Of nothing that PyTorch has."""
        return "fake"

    def alltoall_base(self, output: Tensor, source: Tensor, takes: list[int], gives: list[int], _: Any = None) -> _Sent:
        """Blocks for every peer."""
        size = max(source.numel(), output.numel()) * source.element_size()
        peers = sum(give + take > 0 for give, take in zip(gives, takes, strict=True))
        kind: ExchangeKind = "exchange" if peers == len(self.ranks) - 1 else "neighbours"
        filling = _ANY_COUNT if self.trace.kind == "statistics" else 0.0
        return _Sent(self, self.trace.begin(kind, self.ranks, size), [output], output, filling)

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]  # as it is called
        """The sum, were there others."""
        return _Sent(self, self.trace.begin("all-reduce", self.ranks, sum(t.nbytes for t in tensors)), tensors)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> _Sent:
        """Everybody's numbers: copies of the own ones."""
        number = self.trace.begin("all-gather", self.ranks, source.nbytes)
        with self.trace.stopped():
            output.view(len(self.ranks), -1).copy_(source.view(1, -1).expand(len(self.ranks), -1))
        return _Sent(self, number, [output])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the name before PyTorch 2.13

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Sent:
        """A message to one peer."""
        ranks = self.ranks[self.rank()], self.ranks[to]
        return _Sent(self, self.trace.begin("message", ranks, tensors[0].nbytes), tensors)

    def recv(self, tensors: list[Tensor], sender: int, _tag: int) -> _Sent:
        """A message of one peer."""
        ranks = self.ranks[sender], self.ranks[self.rank()]
        return _Sent(self, self.trace.begin("message", ranks, tensors[0].nbytes), tensors, tensors[0])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], sources: list[Tensor], _: Any = None
    ) -> _Sent:
        """What DistributedDataParallel compares before its first step: everybody has the same."""
        for row, source in zip(outputs, sources, strict=True):
            for output in row:
                output.copy_(source)
        return _Sent(self, None, outputs)

    def broadcast(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]
        """What the first rank has, and everybody else."""
        return _Sent(self, None, tensors)


@dataclass
class _TracedTraffic(Traffic):
    """Bytes that would be sent; the trace notes of what kind the next exchange is."""

    trace: EventTrace = field(kw_only=True)

    def count(self, kind: str, sent: float, received: float) -> None:
        """Add one call of `kind`."""
        super().count(kind, sent, received)
        self.trace.kind = kind


@dataclass
class FakeGroup(Group):
    """A group whose ranks get no tensors of each other; bytes, by which they agree on what to do, they do get.

    Attributes:
        real: the same ranks.
        trace: that notes every exchange.
        made: of the subgroups that were made of it, the ranks' real ones.
    """

    real: Group = field(kw_only=True)
    trace: EventTrace = field(kw_only=True)
    made: list[Group] = field(default_factory=list)

    @property
    def prefers_mesh(self) -> bool:
        """Small tensors are not sent either."""
        return False

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, in order of ranks; its time does not count."""
        with self.trace.stopped():
            return self.real.all_gather_bytes(message)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Some of the ranks, fake as well."""
        real = self.real.subgroup(ranks)
        if real is None:
            return None
        self.made.append(real)
        return fake_group(real, ranks, self.timer, self.trace)


def fake_group(group: Group, ranks: Sequence[int], timer: StepTimer, trace: EventTrace) -> FakeGroup:
    """The ranks of `group`, as fake peers.

    Args:
        group: this rank and others.
        ranks: their numbers in the run.
        timer: of this rank among them.
        trace: that notes every exchange.
    """
    return FakeGroup(
        rank=group.rank,
        size=group.size,
        device=group.device,
        nodes=group.nodes,
        timer=timer,
        process_group=FakeProcessGroup(ranks, group.rank, trace) if group.size > 1 else None,
        mesh=group.mesh,
        traffic=_TracedTraffic(trace=trace),
        real=group,
        trace=trace,
    )


@contextmanager
def known_to_torch(group: Group) -> Iterator[None]:
    """Inside, PyTorch answers `gloo` when it is asked for the backend of a fake group."""
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    if group.process_group is not None:
        known[group.process_group] = (dist.Backend.GLOO, None)
    try:
        yield
    finally:
        known.pop(group.process_group, None)
