"""Lets a rank perform its part of a step alone, in a process group of fake peers, as if all other ranks were there.

Nothing is sent. Tensors from other ranks are zeros, so that the rank computes as usual; statistics are arbitrary
non-zero numbers, because BatchNorm rejects those of no samples. A trace records when the rank computes, when it begins
an exchange and when it needs the result; the oracle replays the traces of all ranks. A rank does not wait for fake
peers, so a step takes its own time only: computing, the idling of a slowed node, Python. All ranks perform their parts
at the same time, so that they share a memory bus or a core as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.benchmark.timing import now
from evener.comm.abortable_group import forget_in_torch, make_known_to_torch
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.comm.traffic import Traffic
from evener.comm.uneven_all_reduce import bytes_of_rank, parts_of
from evener.oracle.replay import ExchangeKind, TraceEvent
from evener.system.accelerators import is_accelerator

_ANY_COUNT = 2.0
"""The count in statistics of fake peers: BatchNorm rejects a single value per channel."""


class EventTrace:
    """The events of one rank, recorded while it runs.

    Attributes:
        kind: kind of the next exchange, under which its traffic is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = ""
        self._events: list[TraceEvent] = []
        self._begun = 0
        self._open: set[int] = set()
        self._computing = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start to count time."""
        self._since = now(self._device)

    def stop(self) -> None:
        """Stop to count time."""
        if self._since is not None:
            self._computing += now(self._device) - self._since
        self._since = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count time inside the block."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self.start()

    def begin(self, kind: ExchangeKind, ranks: tuple[int, ...], nbytes: int) -> int:
        """Record that an exchange begins, and return its number."""
        number, self._begun = self._begun, self._begun + 1
        event = TraceEvent(
            computing=self._take_computing(), act="begin", exchange=number, kind=kind, ranks=ranks, nbytes=nbytes
        )
        self._events.append(event)
        self._open.add(number)
        return number

    def need(self, number: int | None) -> None:
        """Record that the result of an exchange is needed, unless it was needed before or `number` is None."""
        if number is not None and number in self._open:
            self._open.remove(number)
            self._events.append(TraceEvent(computing=self._take_computing(), act="need", exchange=number))

    def finish(self) -> tuple[TraceEvent, ...]:
        """Return the events of the completed step, and begin the next one."""
        self.stop()
        for number in sorted(self._open):
            self.need(number)
        events = (*self._events, TraceEvent(computing=self._take_computing()))
        self._events, self._begun = [], 0
        return events

    def _take_computing(self) -> float:
        """Return the seconds computed since the last event, and reset them."""
        if self._since is not None:
            self.stop()
            self.start()
        seconds, self._computing = self._computing, 0.0
        return seconds


class _Sent(dist.Work):
    """A fake exchange, for which waiting ends immediately."""

    def __init__(self, trace: EventTrace, number: int | None, result: Any, filling: float | None = None) -> None:
        super().__init__()
        self._trace, self._number, self._result, self._filling = trace, number, result, filling

    def wait(self, *_timeout: Any) -> bool:
        """Record that the result is needed now, and fill it."""
        self._trace.need(self._number)
        if self._filling is not None:
            with self._trace.stopped():
                self._result[0].fill_(self._filling)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future with the result."""
        devices: list[Any] = [
            part.device for part in self._result if isinstance(part, Tensor) and is_accelerator(part.device)
        ]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future


class FakeProcessGroup(dist.ProcessGroup):
    """The fake process group of `rank` among `ranks` of the run; PyTorch calls its methods."""

    def __init__(self, ranks: Sequence[int], rank: int, trace: EventTrace) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the constructor for those written in Python
        self.ranks, self.trace = tuple(ranks), trace

    def getBackendName(self) -> str:
        """Return a name that no backend of PyTorch has."""
        return "fake"

    def alltoall_base(self, output: Tensor, source: Tensor, takes: list[int], gives: list[int], _: Any = None) -> _Sent:
        """Record an exchange of blocks with every peer."""
        size = max(source.numel(), output.numel()) * source.element_size()
        peers = sum(give + take > 0 for give, take in zip(gives, takes, strict=True))
        kind: ExchangeKind = "exchange" if peers == len(self.ranks) - 1 else "neighbours"
        filling = _ANY_COUNT if self.trace.kind == "statistics" else 0.0
        return _Sent(self.trace, self.trace.begin(kind, self.ranks, size), [output], filling)

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]  # as it is called
        """Record an all-reduce; the result is this rank's addend."""
        return _Sent(self.trace, self.trace.begin("all-reduce", self.ranks, sum(t.nbytes for t in tensors)), tensors)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> _Sent:
        """Record an all-gather; the others' numbers are copies of this rank's, or arbitrary statistics for zeros."""
        number = self.trace.begin("all-gather", self.ranks, source.nbytes)
        with self.trace.stopped():
            rows, source_row = output.view(len(self.ranks), -1), source.view(1, -1)
            others = source_row
            if self.trace.kind == "statistics":  # a rank without samples counts none, whatever its mean is
                others = source_row.where(source_row != 0, _ANY_COUNT)
            rows.copy_(others.expand_as(rows))
            rows[self.rank()] = source_row[0]
        return _Sent(self.trace, number, [output])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the name before PyTorch 2.13

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Sent:
        """Record a message to one peer."""
        ranks = self.ranks[self.rank()], self.ranks[to]
        return _Sent(self.trace, self.trace.begin("message", ranks, tensors[0].nbytes), tensors)

    def recv(self, tensors: list[Tensor], sender: int, _tag: int) -> _Sent:
        """Record a message from one peer; its content is zeros."""
        ranks = self.ranks[sender], self.ranks[self.rank()]
        return _Sent(self.trace, self.trace.begin("message", ranks, tensors[0].nbytes), tensors, 0.0)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], sources: list[Tensor], _: Any = None
    ) -> _Sent:
        """Copy this rank's tensors for all ranks; DistributedDataParallel compares them before its first step."""
        for row, source in zip(outputs, sources, strict=True):
            for output in row:
                output.copy_(source)
        return _Sent(self.trace, None, outputs)

    def broadcast(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]
        """Do nothing: every rank has the tensors already."""
        return _Sent(self.trace, None, tensors)


@dataclass
class _TracedTraffic(Traffic):
    """Traffic that would be sent; it tells the trace the kind of the next exchange."""

    trace: EventTrace = field(kw_only=True)

    def count(self, kind: str, sent: float, received: float) -> None:
        """Count one call of `kind`."""
        super().count(kind, sent, received)
        self.trace.kind = kind


@dataclass
class FakeGroup(Group):
    """A group whose ranks receive fake tensors but real bytes, by which they agree on decisions.

    Attributes:
        real: the real group of the same ranks.
        trace: records every exchange.
        made: real groups of the subgroups that were made of it.
    """

    real: Group = field(kw_only=True)
    trace: EventTrace = field(kw_only=True)
    made: list[Group] = field(default_factory=list)

    @property
    def prefers_mesh(self) -> bool:
        """Return False: small tensors are not sent either."""
        return False

    @property
    def has_accelerators(self) -> bool:
        """Whether a rank of the real group computes on an accelerator."""
        return self.real.has_accelerators

    def _begin_uneven_all_reduce(self, tensor: Tensor, kind: str) -> torch.futures.Future[Tensor]:
        """Record a sum; its future has ended."""
        future: torch.futures.Future[Any] = self._recorded(tensor, kind).get_future()
        return future.then(lambda done: done.value()[0])

    def begin_all_reduce(self, tensor: Tensor, kind: str) -> Callable[[], object]:
        """Record a sum; the function that is returned records that its result is needed."""
        if not self._has_owners(tensor, kind):
            return super().begin_all_reduce(tensor, kind)
        wait: Callable[[], object] = self._recorded(tensor, kind).wait
        return wait

    def _recorded(self, tensor: Tensor, kind: str) -> Any:
        """Record a sum by owners as an all-reduce, and count the bytes that this rank would send."""
        nbytes = bytes_of_rank(parts_of(tensor.detach().view(-1), self.sum_shares), self.rank)
        self.traffic.count(kind, nbytes, nbytes)
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        assert work is not None
        return work

    def all_gather_bytes(self, message: bytes, topic: str = "") -> list[bytes]:
        """Return every rank's `message`, in order of ranks; the time does not count."""
        with self.trace.stopped():
            return self.real.all_gather_bytes(message, topic)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return a fake group of some of the ranks."""
        real = self.real.subgroup(ranks)
        if real is None:
            return None
        self.made.append(real)
        return fake_group(real, ranks, self.timer, self.trace)


def fake_group(group: Group, ranks: Sequence[int], timer: StepTimer, trace: EventTrace) -> FakeGroup:
    """Return the ranks of `group`, numbers `ranks` of the run, as fake peers; `timer` is this rank's timer."""
    return FakeGroup(
        rank=group.rank,
        size=group.size,
        device=group.device,
        nodes=group.nodes,
        timer=timer,
        process_group=FakeProcessGroup(ranks, group.rank, trace) if group.size > 1 else None,
        mesh=group.mesh,
        sum_shares=group.sum_shares,
        traffic=_TracedTraffic(trace=trace),
        real=group,
        trace=trace,
    )


@contextmanager
def known_to_torch(group: Group) -> Iterator[None]:
    """Let PyTorch report `gloo` as the backend of a fake group inside the block."""
    if group.process_group is None:
        yield
        return
    make_known_to_torch(group.process_group, dist.Backend.GLOO)
    try:
        yield
    finally:
        forget_in_torch(group.process_group)
