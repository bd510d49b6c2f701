"""What exchanges cost the ranks of a group beyond what each of them computes for it: by kind and by size.

    cost = seconds of the exchange among the ranks - seconds that a rank packs and unpacks for it among fake peers

The slowest rank packs longest, and the others wait for it: what is left of its seconds is the transport, so the least
difference of all ranks counts. Before a plan is made, the alpha and beta of the ring that all ranks form tell enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from evener.benchmark.fake_group import EventTrace, fake_group
from evener.benchmark.timing import now
from evener.comm.exchange import Exchange, Region, Route
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.oracle.replay import ExchangeKind, ExchangePoint, ExchangeTiming

_Begin: TypeAlias = Callable[[], Callable[[], object]]
_Beginning: TypeAlias = Callable[[Group, int], _Begin]

_SMALL_BYTES = 8
_LEAST_LARGE_BYTES = 2**20
_MESSAGES = 20
_ROUNDS = 5
_REPEATS = 4
_ATTEMPTS = 3
_SIDE = 128
"""Rows and columns of the matrices that are multiplied meanwhile."""
_ENOUGH = 1.5
"""Times the seconds of an exchange are computed meanwhile, to hide all that can be hidden."""
_STEP = 1.25
"""Sizes nearer to each other than by this factor are not measured apart."""


def measure_exchanges(group: Group, sizes: Mapping[ExchangeKind, Collection[int]]) -> list[ExchangeTiming]:
    """What exchanges among the ranks of `group` cost; every rank calls this and gets the same.

    Args:
        group: the ranks.
        sizes: by kind, bytes of the rank that sends or receives most, as in `Beat`.
    """
    timings = []
    for kind, wanted in sorted(sizes.items()):
        points = [_point(group, kind, nbytes) for nbytes in distinct_sizes(wanted)]
        timings.append(ExchangeTiming(kind=kind, ranks=group.size, points=tuple(points)))
    return timings


def measure_all_reduce(group: Group, largest_bytes: int) -> tuple[float, float]:
    """(alpha [s], beta [s/byte]) of a ring all-reduce: 2 (p-1) (alpha + n/p beta) seconds for n bytes over p ranks.

    All ranks of the group call this and get the same answer, that of the slowest.

    Args:
        group: the ranks; (0, 0) for a single one.
        largest_bytes: of the messages to come; the large message is of this size, within reason.
    """
    if group.size == 1:
        return 0.0, 0.0
    large_bytes = min(max(largest_bytes, _LEAST_LARGE_BYTES), 25 * 2**20)
    small, large = (_all_reduce_seconds(group, nbytes) for nbytes in (_SMALL_BYTES, large_bytes))
    steps = 2 * (group.size - 1)
    alpha = small / steps
    beta = max(0.0, large - small) / steps * group.size / large_bytes
    agreed = group.all_reduce_max([alpha, beta])
    return agreed[0], agreed[1]


def measure_small_exchange(group: Group) -> float:
    """Seconds of an exchange of small tensors among all ranks, such as BatchNorm's statistics: that of the slowest."""
    if group.size == 1:
        return 0.0
    message, taken = torch.zeros(64, device=group.device), []
    for _ in range(_MESSAGES):
        start = time.perf_counter()
        group.all_sum(message, "measuring")
        taken.append(now(group.device) - start)
    return group.all_reduce_max([median(taken)])[0]


def distinct_sizes(sizes: Iterable[int]) -> list[int]:
    """The sizes to measure: of those that hardly differ, the larger one; each at least 4 bytes."""
    kept: list[int] = []
    for size in sorted({max(4, size) for size in sizes}, reverse=True):
        if not kept or size * _STEP <= kept[-1]:
            kept.append(size)
    return kept[::-1]


def _all_reduce_seconds(group: Group, nbytes: int) -> float:
    """Least seconds of an all-reduce of `nbytes`."""
    buffer = torch.zeros(nbytes // 4, device=group.device)
    best = float("inf")
    for _ in range(_ROUNDS):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(buffer, "measuring")
        best = min(best, now(group.device) - start)
    return best


def _point(group: Group, kind: ExchangeKind, nbytes: int) -> ExchangePoint:
    """The figures of one size."""
    comparison = _Comparison(group, _BEGINNINGS[kind], nbytes)
    seconds = comparison.difference(0)
    beside = comparison.difference(seconds * _ENOUGH) if kind in _BEGIN_EARLY else seconds
    return ExchangePoint(nbytes=nbytes, seconds=seconds, beside=min(seconds, beside))


class _Comparison:
    """One exchange among the ranks of a group, and the same one among fake peers.

    Args:
        group: the ranks.
        beginning: of the exchange: (group, bytes) -> what begins it and returns what waits for it.
        nbytes: of the rank that sends or receives most.
    """

    def __init__(self, group: Group, beginning: _Beginning, nbytes: int) -> None:
        self._group = group
        self._trace, self._timer = EventTrace(group.device), StepTimer(group.device, group.timer.pace.speed)
        fake = fake_group(group, range(group.size), self._timer, self._trace)
        self._real, self._fake = beginning(group, nbytes), beginning(fake, nbytes)
        self._side = torch.rand(_SIDE, _SIDE, device=group.device)

    def difference(self, computing: float) -> float:
        """Seconds that the exchange takes longer than with fake peers, with so many of computing before its end.

        What takes no time at all, though nothing is computed beside it, was disturbed, and is measured again.
        """
        products = self._products(computing)
        for _ in range(1 if computing else _ATTEMPTS):
            if (least := self._least_median(products)) > 0:
                return least
        return 0.0

    def _least_median(self, products: int) -> float:
        """Of all ranks, the least median of the difference."""
        differences = []
        for _ in range(_ROUNDS + 1):
            differences.append(self._seconds_real(products) - self._seconds_fake(products))
        self._group.timer.discard()
        rows = self._group.all_gather_bytes(repr(median(differences[1:])).encode())
        return min(map(float, rows))

    def _products(self, seconds: float) -> int:
        """How many small matrix products take so long here."""
        if not seconds:
            return 0
        start = time.perf_counter()
        for _ in range(_REPEATS):
            torch.mm(self._side, self._side)
        return round(seconds * _REPEATS / (time.perf_counter() - start)) + 1

    def _seconds_real(self, products: int) -> float:
        group = self._group
        group.barrier()
        group.timer.resume("fb")
        start = time.perf_counter()
        self._run(self._real, products)
        seconds = now(group.device) - start
        group.timer.pause()
        return seconds / _REPEATS

    def _seconds_fake(self, products: int) -> float:
        self._trace.start()
        self._timer.resume("fb")
        self._run(self._fake, products)
        self._timer.pause()
        return sum(beat.computing for beat in self._trace.finish()) / _REPEATS

    def _run(self, begin: _Begin, products: int) -> None:
        for _ in range(_REPEATS):
            end = begin()
            for _ in range(products):
                torch.mm(self._side, self._side)
            end()


def _reduced(group: Group, nbytes: int) -> _Begin:
    numbers = torch.zeros(nbytes // 4, device=group.device)

    def begin() -> Callable[[], object]:
        group.timer.break_for_others()
        work = dist.all_reduce(numbers, group=group.process_group, async_op=True)
        assert work is not None

        def end() -> None:
            with group.waiting("measuring"):
                work.wait()

        return end

    return begin


def _gathered(group: Group, nbytes: int) -> _Begin:
    numbers = torch.zeros(nbytes // 4, device=group.device)
    return lambda: lambda: group.all_gather(numbers, "measuring")


def _exchanged(group: Group, nbytes: int) -> _Begin:
    """Every rank has a row that all others need."""
    width = max(1, nbytes // 4 // (group.size - 1))
    own = tuple(_rows(rank, rank + 1, width) for rank in range(group.size))
    return _gather_rows(group, own, (_rows(0, group.size, width),) * group.size, width)


def _with_neighbours(group: Group, nbytes: int) -> _Begin:
    """Every rank has a row that the ranks before and after it need."""
    width = max(1, nbytes // 4 // min(2, group.size - 1))
    own = tuple(_rows(rank, rank + 1, width) for rank in range(group.size))
    need = tuple(_rows(max(0, rank - 1), min(group.size, rank + 2), width) for rank in range(group.size))
    return _gather_rows(group, own, need, width)


def _gather_rows(group: Group, own: tuple[Region, ...], need: tuple[Region, ...], width: int) -> _Begin:
    exchange = Exchange(group, [Route(own, need)], "measuring")
    row = torch.zeros(1, width, device=group.device)
    return lambda: exchange.begin_all_gather([row])


def _rows(first: int, last: int, width: int) -> Region:
    return ((first, last),), ((0, width),)


_BEGINNINGS: dict[ExchangeKind, _Beginning] = {
    "all-reduce": _reduced,
    "all-gather": _gathered,
    "exchange": _exchanged,
    "neighbours": _with_neighbours,
}
_BEGIN_EARLY: tuple[ExchangeKind, ...] = ("all-reduce", "exchange", "neighbours")
"""Kinds that a rank may begin before it needs them."""
