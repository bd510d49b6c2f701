"""Measures what exchanges cost the ranks of a group beyond each rank's own computing for them, by kind and size.

    cost = seconds of the exchange among the ranks - seconds that a rank packs and unpacks for it among fake peers

The slowest rank packs longest, and the others wait for it. The remaining seconds are the transport, so the smallest
difference of all ranks counts. Before a plan exists, alpha and beta of the ring of all ranks suffice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from evener.benchmark.fake_group import EventTrace, fake_group
from evener.benchmark.links import measure_lines
from evener.benchmark.timing import now
from evener.comm.exchange import Exchange, Region, Route
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.replay import ExchangeKind, ExchangePoint, ExchangeTiming

_Begin: TypeAlias = Callable[[], Callable[[], object]]
_Beginning: TypeAlias = Callable[[Group, int], _Begin]

_SMALL_BYTES = 8
_MIN_LARGE_BYTES = 2**20
_MAX_OWNED_RATIO = 0.95
"""Sums by owners must take at most this fraction of a ring's time: their additions compete with computing."""
_MIN_OWNED_BYTES = 2**18
"""Smaller gradients are summed in a ring: their messages cost more than their bytes."""
_MESSAGES = 20
_ROUNDS = 5
_REPEATS = 4
_MAX_ATTEMPTS = 3
_SIDE = 128
"""Rows and columns of the matrices that are multiplied during an exchange."""
_COMPUTING_FACTOR = 1.5
"""An exchange is timed beside computing of this many times its duration, which hides all that can be hidden."""
_SIZE_FACTOR = 1.25
"""Sizes that differ by less than this factor are not measured separately."""


def measure_exchanges(group: Group, sizes: Mapping[ExchangeKind, Collection[int]]) -> list[ExchangeTiming]:
    """Return the cost of exchanges among the ranks of `group`; every rank calls this and gets the same result.

    Args:
        group: the ranks.
        sizes: for each kind, bytes of the rank that sends or receives most, as in `TraceEvent`.
    """
    timings = []
    for kind, kind_sizes in sorted(sizes.items()):
        points = [_point(group, kind, nbytes) for nbytes in distinct_sizes(kind_sizes)]
        timings.append(ExchangeTiming(kind=kind, ranks=group.size, points=tuple(points)))
    return timings


def measure_all_reduce(group: Group, largest_bytes: int) -> tuple[float, float]:
    """Return (alpha [s], beta [s/byte]) of a ring all-reduce: 2 (p-1) (alpha + n/p beta) seconds for n bytes, p ranks.

    All ranks of the group call this and get the same answer, that of the slowest.

    Args:
        group: the ranks; (0, 0) for a single one.
        largest_bytes: largest message of the run; the large test message has this size, within limits.
    """
    if group.size == 1:
        return 0.0, 0.0
    large_bytes = min(max(largest_bytes, _MIN_LARGE_BYTES), 25 * 2**20)
    small, large = (_all_reduce_seconds(group, nbytes) for nbytes in (_SMALL_BYTES, large_bytes))
    steps = 2 * (group.size - 1)
    alpha = small / steps
    beta = max(0.0, large - small) / steps * group.size / large_bytes
    agreed = group.all_reduce_max([alpha, beta])
    return agreed[0], agreed[1]


class Sums(NamedTuple):
    """The cost of sums over all ranks.

    Attributes:
        alpha: seconds of a message, in the terms of a ring.
        beta: seconds per byte, in the same terms.
        ring: (alpha, beta) of a ring.
        line_rates: bytes per second of each node's line, by which sums are divided; empty if they are made in a ring.
    """

    alpha: float = 0.0
    beta: float = 0.0
    ring: tuple[float, float] = (0.0, 0.0)
    line_rates: Mapping[str, float] = MappingProxyType({})


def may_have_owners(group: Group, largest_bytes: int, hosts: Sequence[str]) -> bool:
    """Return whether sums of gradients of so many bytes can be divided by lines; see `measure_sums`."""
    is_small = group.size < 3 or len(set(hosts)) < 2 or largest_bytes < _MIN_OWNED_BYTES
    return not is_small and group.process_group is not None and not group.has_accelerators


def measure_sums(group: Group, largest_bytes: int, hosts: Sequence[str]) -> Sums:
    """Choose how gradients are summed: in a ring, or by owners, where lines differ so much that this is faster.

    All ranks of the group call this and get the same answer.

    Args:
        group: the ranks; it sums in the chosen way from now on.
        largest_bytes: as in `measure_all_reduce`.
        hosts: machine of every rank.
    """
    group.divide_sums({})
    ring = measure_all_reduce(group, largest_bytes)
    if not may_have_owners(group, largest_bytes, hosts):
        return Sums(*ring, ring)
    rates = dict(zip(group.nodes, measure_lines(group, hosts), strict=True))
    group.divide_sums(rates)
    if not group.sum_shares:
        return Sums(*ring, ring)
    owned = measure_all_reduce(group, largest_bytes)
    both = [all_reduce_seconds(largest_bytes, group.size, *way) for way in (owned, ring)]
    if both[0] <= _MAX_OWNED_RATIO * both[1]:
        return Sums(*owned, ring, rates)
    group.divide_sums({})
    return Sums(*ring, ring)


def measure_small_exchange(group: Group) -> float:
    """Return the slowest rank's seconds for an exchange of small tensors, such as BatchNorm's statistics."""
    if group.size == 1:
        return 0.0
    message, times = torch.zeros(64, device=group.device), []
    for _ in range(_MESSAGES):
        start = time.perf_counter()
        group.all_sum(message, "measuring")
        times.append(now(group.device) - start)
    return group.all_reduce_max([median(times)])[0]


def distinct_sizes(sizes: Iterable[int]) -> list[int]:
    """Return the sizes to measure: the larger of nearly equal ones; each at least 4 bytes."""
    distinct: list[int] = []
    for size in sorted({max(4, size) for size in sizes}, reverse=True):
        if not distinct or size * _SIZE_FACTOR <= distinct[-1]:
            distinct.append(size)
    return distinct[::-1]


def _all_reduce_seconds(group: Group, nbytes: int) -> float:
    """Return the least seconds of an all-reduce of `nbytes`."""
    buffer = torch.zeros(nbytes // 4, device=group.device)
    best = float("inf")
    for _ in range(_ROUNDS):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(buffer, "measuring")
        best = min(best, now(group.device) - start)
    return best


def _point(group: Group, kind: ExchangeKind, nbytes: int) -> ExchangePoint:
    """Return the measurement of one size."""
    comparison = _Comparison(group, _BEGINNINGS[kind], nbytes)
    seconds = comparison.difference(0)
    beside = comparison.difference(seconds * _COMPUTING_FACTOR) if kind in _BEGIN_EARLY else seconds
    return ExchangePoint(nbytes=nbytes, seconds=seconds, beside=min(seconds, beside))


class _Comparison:
    """One exchange among the ranks of a group, and the same one among fake peers.

    Args:
        group: the ranks.
        beginning: (group, bytes) -> a function that begins the exchange and returns a function that waits for it.
        nbytes: bytes of the rank that sends or receives most.
    """

    def __init__(self, group: Group, beginning: _Beginning, nbytes: int) -> None:
        self._group = group
        self._trace, self._timer = EventTrace(group.device), StepTimer(group.device, group.timer.pace.speed)
        fake = fake_group(group, range(group.size), self._timer, self._trace)
        self._real, self._fake = beginning(group, nbytes), beginning(fake, nbytes)
        self._side = torch.rand(_SIDE, _SIDE, device=group.device)

    def difference(self, computing: float) -> float:
        """Return the additional seconds of the exchange among real peers, with `computing` seconds before its end.

        A measurement of zero without computing was disturbed, and is repeated.
        """
        products = self._products(computing)
        for _ in range(1 if computing else _MAX_ATTEMPTS):
            if (seconds := self._least_median(products)) > 0:
                return seconds
        return 0.0

    def _least_median(self, products: int) -> float:
        """Return the smallest median difference of all ranks."""
        differences = []
        for _ in range(_ROUNDS + 1):
            differences.append(self._seconds_real(products) - self._seconds_fake(products))
        self._group.timer.discard()
        rows = self._group.all_gather_bytes(repr(median(differences[1:])).encode())
        return min(map(float, rows))

    def _products(self, seconds: float) -> int:
        """Return how many small matrix products take `seconds` on this rank."""
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
        return sum(event.computing for event in self._trace.finish()) / _REPEATS

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
        wait = group.begin_all_reduce(numbers, "measuring")

        def end() -> None:
            with group.waiting("measuring"):
                wait()

        return end

    return begin


def _gathered(group: Group, nbytes: int) -> _Begin:
    numbers = torch.zeros(nbytes // 4, device=group.device)
    return lambda: lambda: group.all_gather(numbers, "measuring")


def _exchanged(group: Group, nbytes: int) -> _Begin:
    """Let every rank have a row that all other ranks need."""
    width = max(1, nbytes // 4 // (group.size - 1))
    rows = tuple(_rows(rank, rank + 1, width) for rank in range(group.size))
    return _gather_rows(group, rows, (_rows(0, group.size, width),) * group.size, width)


def _with_neighbours(group: Group, nbytes: int) -> _Begin:
    """Let every rank have a row that the ranks before and after it need."""
    width = max(1, nbytes // 4 // min(2, group.size - 1))
    rows = tuple(_rows(rank, rank + 1, width) for rank in range(group.size))
    need = tuple(_rows(max(0, rank - 1), min(group.size, rank + 2), width) for rank in range(group.size))
    return _gather_rows(group, rows, need, width)


def _gather_rows(group: Group, rows: tuple[Region, ...], need: tuple[Region, ...], width: int) -> _Begin:
    exchange = Exchange(group, [Route(rows, need)], "measuring")
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
"""Kinds that a rank may begin before it needs their result."""
