"""A rank performs its part of a step alone, in a process group of fake peers, as if all others were there.

Nothing is sent. What would come from the others is zeros, so that the rank computes what it would compute; but of
statistics, where zeros would be refused as those of no samples, any others. A trace says when the rank computes, when
it begins an exchange and when it needs the result; the oracle replays the traces of all ranks. Nobody waits for fake
peers, so a step takes the rank's own time: computing, the idling of a slowed node, what Python takes. All ranks perform
their parts at the same time, so that what they share (a memory bus, a core) is shared as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.benchmark.timing import now
from evener.comm.abortable_group import groups_known_to_torch
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.comm.traffic import Traffic
from evener.oracle.replay import ExchangeKind, TraceEvent

_ANY_COUNT = 2.0
"""As statistics that come from the others: BatchNorm refuses a single value a channel."""


class EventTrace:
    """The beats of one rank, as they are played.

    Attributes:
        kind: of what is exchanged next, as traffic is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = ""
        self._beats: list[TraceEvent] = []
        self._begun = 0
        self._open: set[int] = set()
        self._computing = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """From now on time counts."""
        self._since = now(self._device)

    def stop(self) -> None:
        """From now on time does not count."""
        if self._since is not None:
            self._computing += now(self._device) - self._since
        self._since = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, time does not count."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self.start()

    def begin(self, kind: ExchangeKind, ranks: tuple[int, ...], nbytes: int) -> int:
        """An exchange begins; its number."""
        number, self._begun = self._begun, self._begun + 1
        self._beats.append(
            TraceEvent(computing=self._taken(), act="begin", exchange=number, kind=kind, ranks=ranks, nbytes=nbytes)
        )
        self._open.add(number)
        return number

    def need(self, number: int | None) -> None:
        """The result of an exchange is needed now; nothing if it was needed before, or is of no exchange."""
        if number is not None and number in self._open:
            self._open.remove(number)
            self._beats.append(TraceEvent(computing=self._taken(), act="need", exchange=number))

    def finish(self) -> tuple[TraceEvent, ...]:
        """The step is over; its beats. The next one begins."""
        self.stop()
        for number in sorted(self._open):
            self.need(number)
        beats = (*self._beats, TraceEvent(computing=self._taken()))
        self._beats, self._begun = [], 0
        return beats

    def _taken(self) -> float:
        """Seconds computed since the last beat."""
        if self._since is not None:
            self.stop()
            self.start()
        taken, self._computing = self._computing, 0.0
        return taken


class _Sent(dist.Work):
    """Something that was sent to nobody; waiting for it ends at once."""

    def __init__(self, trace: EventTrace, number: int | None, result: Any, filling: float | None = None) -> None:
        super().__init__()
        self._trace, self._number, self._result, self._filling = trace, number, result, filling

    def wait(self, *_timeout: Any) -> bool:
        """The result is needed now."""
        self._trace.need(self._number)
        if self._filling is not None:
            with self._trace.stopped():
                self._result[0].fill_(self._filling)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """What has the result already."""
        devices: list[Any] = [one.device for one in self._result if isinstance(one, Tensor) and one.is_cuda]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future


class FakeProcessGroup(dist.ProcessGroup):
    """The process group of a rank, number `rank` of `ranks` of the run; methods are those that PyTorch calls."""

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
        return _Sent(self.trace, self.trace.begin(kind, self.ranks, size), [output], filling)

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]  # as it is called
        """The sum, were there others."""
        return _Sent(self.trace, self.trace.begin("all-reduce", self.ranks, sum(t.nbytes for t in tensors)), tensors)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> _Sent:
        """Everybody's numbers: copies of the own ones; any statistics, where they would be those of no samples."""
        number = self.trace.begin("all-gather", self.ranks, source.nbytes)
        with self.trace.stopped():
            rows, own = output.view(len(self.ranks), -1), source.view(1, -1)
            others = own if own.any() or self.trace.kind != "statistics" else torch.full_like(own, _ANY_COUNT)
            rows.copy_(others.expand_as(rows))
            rows[self.rank()] = own[0]
        return _Sent(self.trace, number, [output])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the name before PyTorch 2.13

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Sent:
        """A message to one peer."""
        ranks = self.ranks[self.rank()], self.ranks[to]
        return _Sent(self.trace, self.trace.begin("message", ranks, tensors[0].nbytes), tensors)

    def recv(self, tensors: list[Tensor], sender: int, _tag: int) -> _Sent:
        """A message of one peer."""
        ranks = self.ranks[sender], self.ranks[self.rank()]
        return _Sent(self.trace, self.trace.begin("message", ranks, tensors[0].nbytes), tensors, 0.0)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], sources: list[Tensor], _: Any = None
    ) -> _Sent:
        """What DistributedDataParallel compares before its first step: everybody has the same."""
        for row, source in zip(outputs, sources, strict=True):
            for output in row:
                output.copy_(source)
        return _Sent(self.trace, None, outputs)

    def broadcast(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]
        """What the first rank has, and everybody else."""
        return _Sent(self.trace, None, tensors)


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

    def all_gather_bytes(self, message: bytes, topic: str = "") -> list[bytes]:
        """Every rank's `message`, in order of ranks; its time does not count."""
        with self.trace.stopped():
            return self.real.all_gather_bytes(message, topic)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Some of the ranks, fake as well."""
        real = self.real.subgroup(ranks)
        if real is None:
            return None
        self.made.append(real)
        return fake_group(real, ranks, self.timer, self.trace)


def fake_group(group: Group, ranks: Sequence[int], timer: StepTimer, trace: EventTrace) -> FakeGroup:
    """The ranks of `group`, numbers `ranks` of the run, as fake peers; `timer` is that of this rank among them."""
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
    known = groups_known_to_torch()
    if group.process_group is not None:
        known[group.process_group] = (dist.Backend.GLOO, None)
    try:
        yield
    finally:
        known.pop(group.process_group, None)
