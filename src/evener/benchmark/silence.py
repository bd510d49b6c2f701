"""A process group in which nobody answers: a rank plays its part of a step in it alone, as if all others were there.

Nothing is sent. What would come from the others is zeros, so that the rank computes what it would compute; but of
statistics, where zeros would be refused as those of no samples, any others. A score is told of every exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.benchmark.score import Score
from evener.comm.group import Group, Traffic
from evener.comm.step_timing import StepTimer
from evener.oracle.replay import ExchangeKind

_ANY_COUNT = 2.0
"""As statistics that come from the others: BatchNorm refuses a single value a channel."""


class _Sent(dist.Work):
    """Something that was said into the silence; waiting for it ends at once."""

    def __init__(
        self, silence: Silence, number: int | None, result: Any, empty: Tensor | None = None, filling: float = 0.0
    ) -> None:
        super().__init__()
        self._silence, self._number, self._result = silence, number, result
        self._empty, self._filling = empty, filling

    def wait(self, *_timeout: Any) -> bool:
        """The result is needed now."""
        if self._number is not None:
            self._silence.score.need(self._number)
        if self._empty is not None:
            with self._silence.score.stopped():
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


class Silence(dist.ProcessGroup):
    """The process group of a rank whose peers are silent; methods are those that PyTorch calls.

    Args:
        ranks: of the run, that are in the group.
        rank: of this process among them.
        score: that is told of every exchange.
    """

    def __init__(self, ranks: Sequence[int], rank: int, score: Score) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the constructor for those written in Python
        self.ranks, self.score = tuple(ranks), score

    def getBackendName(self) -> str:
        """Of nothing that PyTorch has."""
        return "silence"

    def alltoall_base(self, output: Tensor, source: Tensor, takes: list[int], gives: list[int], _: Any = None) -> _Sent:
        """Blocks for every peer."""
        size = max(source.numel(), output.numel()) * source.element_size()
        peers = sum(give + take > 0 for give, take in zip(gives, takes, strict=True))
        kind: ExchangeKind = "exchange" if peers == len(self.ranks) - 1 else "neighbours"
        filling = _ANY_COUNT if self.score.kind == "statistics" else 0.0
        return _Sent(self, self.score.begin(kind, self.ranks, size), [output], output, filling)

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Sent:  # type: ignore[override]  # as it is called
        """The sum, were there others."""
        return _Sent(self, self.score.begin("all-reduce", self.ranks, sum(t.nbytes for t in tensors)), tensors)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> _Sent:
        """Everybody's numbers: copies of the own ones."""
        number = self.score.begin("all-gather", self.ranks, source.nbytes)
        with self.score.stopped():
            output.view(len(self.ranks), -1).copy_(source.view(1, -1).expand(len(self.ranks), -1))
        return _Sent(self, number, [output])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the name before PyTorch 2.13

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Sent:
        """A message to one peer."""
        ranks = self.ranks[self.rank()], self.ranks[to]
        return _Sent(self, self.score.begin("message", ranks, tensors[0].nbytes), tensors)

    def recv(self, tensors: list[Tensor], sender: int, _tag: int) -> _Sent:
        """A message of one peer."""
        ranks = self.ranks[sender], self.ranks[self.rank()]
        return _Sent(self, self.score.begin("message", ranks, tensors[0].nbytes), tensors, tensors[0])

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
class _ScoredTraffic(Traffic):
    """Bytes that would be sent; the score is told of what kind the next exchange is."""

    score: Score = field(kw_only=True)

    def count(self, kind: str, sent: float, received: float) -> None:
        """Add one call of `kind`."""
        super().count(kind, sent, received)
        self.score.kind = kind


@dataclass
class SilentGroup(Group):
    """A group whose ranks hear no tensors of each other; words, by which they agree on what to do, they do hear.

    Attributes:
        aloud: the same ranks.
        score: that is told of every exchange.
        made: of the subgroups that were made of it, the ranks' own, aloud.
    """

    aloud: Group = field(kw_only=True)
    score: Score = field(kw_only=True)
    made: list[Group] = field(default_factory=list)

    @property
    def prefers_mesh(self) -> bool:
        """Small tensors are not heard either."""
        return False

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, in order of ranks; its time does not count."""
        with self.score.stopped():
            return self.aloud.all_gather_bytes(message)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Some of the ranks, silent as well."""
        aloud = self.aloud.subgroup(ranks)
        if aloud is None:
            return None
        self.made.append(aloud)
        return silent_group(aloud, ranks, self.timer, self.score)


def silent_group(group: Group, ranks: Sequence[int], timer: StepTimer, score: Score) -> SilentGroup:
    """The ranks of `group`, silent.

    Args:
        group: this rank and others.
        ranks: their numbers in the run.
        timer: of this rank in the silence.
        score: that is told of every exchange.
    """
    return SilentGroup(
        rank=group.rank,
        size=group.size,
        device=group.device,
        nodes=group.nodes,
        timer=timer,
        process_group=Silence(ranks, group.rank, score) if group.size > 1 else None,
        mesh=group.mesh,
        traffic=_ScoredTraffic(score=score),
        aloud=group,
        score=score,
    )


@contextmanager
def known_to_torch(group: Group) -> Iterator[None]:
    """Inside, PyTorch answers `gloo` when it is asked for the backend of a silent group."""
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    if group.process_group is not None:
        known[group.process_group] = (dist.Backend.GLOO, None)
    try:
        yield
    finally:
        known.pop(group.process_group, None)
