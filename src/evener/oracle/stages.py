"""Divides a chain of layers into consecutive stages on unequal devices so that the slowest of them is fastest.

A stage k on device d that holds units i to j is busy, for every micro-batch, for the seconds of its units on d; the
link to it for alpha + bytes * beta, for what lives across the cut in front of it. The slowest of all these sets the
pace of the pipeline; a stage has to fit its device's memory. Which device computes which stage is chosen, too.

Exact, by dynamic programming over (devices used so far, last device, units so far):

    pace(S + d, d, j) = min over a, i of  max(pace(S, a, i), link(a, d, i), seconds(d, i, j))

Devices that do not differ are not told apart. Of all divisions of that pace the one of the shortest way through the
pipeline is taken, which a second pass with sums in place of maxima finds. O(sets of devices * devices * units^2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from evener.errors import DoesNotFit, require

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What lies between two neighbouring places where a model may be cut, for one micro-batch.

    Attributes:
        seconds: forward and backward, on every device.
        weight_bytes: of weights, gradients and the optimiser's state.
        kept_bytes: of activations that backward needs.
        boundary_bytes: of what lives across the cut behind it, and has to travel if it is cut there.
    """

    seconds: tuple[float, ...]
    weight_bytes: float = 0.0
    kept_bytes: float = 0.0
    boundary_bytes: float = 0.0

    def __post_init__(self) -> None:
        require(all(0 <= s < inf for s in self.seconds), "seconds", self.seconds, "zero or more and finite")


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """The devices and what joins them.

    Attributes:
        memory: bytes of every device that a stage may take.
        alpha: seconds of latency from device to device; a row for every sender.
        beta: seconds per byte, likewise.
        in_order: whether device d computes stage d; otherwise the best order is chosen.
    """

    memory: tuple[float, ...]
    alpha: tuple[tuple[float, ...], ...] = ()
    beta: tuple[tuple[float, ...], ...] = ()
    in_order: bool = False

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.memory)

    def of(self, devices: Sequence[int]) -> DeviceGroup:
        """Some `devices` of this group, in that order."""
        alpha, beta = (
            tuple(tuple(table[i][j] for j in devices) for i in devices) if table else ()
            for table in (self.alpha, self.beta)
        )
        memory = tuple(self.memory[device] for device in devices)
        return DeviceGroup(memory=memory, alpha=alpha, beta=beta, in_order=self.in_order)

    def link_seconds(self, sender: int, receiver: int, nbytes: _Floats) -> _Floats:
        """Seconds of messages of `nbytes`."""
        alpha = self.alpha[sender][receiver] if self.alpha else 0.0
        beta = self.beta[sender][receiver] if self.beta else 0.0
        return alpha + nbytes * beta


@dataclass(frozen=True, kw_only=True)
class Held:
    """How many micro-batches a stage holds at once.

    Attributes:
        waiting: whose inputs it holds, between forward and backward; one number a stage.
        kept: whose activations it holds, which are fewer where they are recomputed; one number a stage.
    """

    waiting: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """A chain of units, divided.

    Attributes:
        ends: stage k holds units ends[k-1] to ends[k] (the first one from 0).
        devices: of the stages, in order.
        pace: seconds between two micro-batches: of the slowest stage or link.
        seconds: of one micro-batch through all stages and links.
    """

    ends: tuple[int, ...]
    devices: tuple[int, ...]
    pace: float
    seconds: float

    def step_seconds(self, micro_batches: int) -> float:
        """Of `micro_batches`, forward and backward: the first passes through, the others follow at the pace."""
        return self.seconds + (micro_batches - 1) * self.pace


def divide(units: Sequence[Unit], group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut:
    """The division of `units` into stages of the fastest pace; arguments as of `best_cut`.

    Raises:
        DoesNotFit: no division fits the memory of the devices.
    """
    cut = best_cut(units, group, held, stages)
    if cut is None:
        raise DoesNotFit(f"no division of the model into {stages or 'any number of'} stages fits the devices' memory")
    return cut


def best_cut(units: Sequence[Unit], group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut | None:
    """The division of `units` into stages of the fastest pace; None if none fits the memory of the devices.

    Args:
        units: in order.
        group: devices; every unit has as many `seconds`.
        held: by stage, for as many stages as there may be.
        stages: their number; by default as many as pay, at most one a device.
    """
    most = min(group.size, len(units), len(held.kept))
    require(stages is None or 1 <= stages <= most, "stages", stages, f"1 to {most}, or None")
    chain = _Chain(units, group, held)
    counts = range(1, most + 1) if stages is None else [stages]
    fastest = min((chain.best(count, np.maximum, inf) for count in counts), key=lambda way: way.value, default=None)
    if fastest is None or fastest.value == inf:
        return None
    way = min((chain.best(count, np.add, fastest.value) for count in counts), key=lambda way: way.value)
    return StageCut(ends=way.ends, devices=way.devices, pace=fastest.value, seconds=way.value)


@dataclass(frozen=True)
class _Way:
    """The best value of some first stages, and how it came about."""

    value: float
    ends: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()


_State = tuple[tuple[int, ...], int]
"""(how many devices of every kind are used, kind of the last one)"""


class _Chain:
    """The units as prefix sums, and the search over them."""

    def __init__(self, units: Sequence[Unit], group: DeviceGroup, held: Held) -> None:
        self._group, self._held = group, held
        self._kinds = _kinds(units, group)
        self._seconds = _prefix([unit.seconds for unit in units])
        self._weights, self._kept = (
            _prefix([(u.weight_bytes,) for u in units])[:, 0],
            _prefix([(u.kept_bytes,) for u in units])[:, 0],
        )
        self._boundary = np.array([0.0] + [unit.boundary_bytes for unit in units])
        self._size = len(units) + 1
        self._pair_weights = self._weights[None, :] - self._weights[:, None]
        self._pair_kept = self._kept[None, :] - self._kept[:, None]
        self._is_later = ~np.tri(self._size, dtype=bool)
        self._busy_known: dict[tuple[int, int, float], _Floats] = {}

    def best(self, stages: int, combine: Callable[[_Floats, _Floats], _Floats], bound: float) -> _Way:
        """The division into `stages` of the least value: of all busy times, each at most `bound`, combined."""
        start = np.full(self._size, inf)
        start[0] = 0.0
        reached: dict[_State, _Floats] = {((0,) * len(self._kinds), -1): start}
        froms: list[dict[_State, tuple[npt.NDArray[np.intp], list[_State], npt.NDArray[np.intp]]]] = []
        for stage in range(stages):
            ways: dict[_State, list[tuple[_State, _Floats]]] = {}
            for state, values in reached.items():
                for kind in self._next(state, stage):
                    arrival = combine(values, self._link(state[1], kind, bound))
                    used = tuple(n + (k == kind) for k, n in enumerate(state[0]))
                    ways.setdefault((used, kind), []).append((state, arrival))
            reached, found = {}, {}
            for state, options in ways.items():
                arrivals = np.array([arrival for _, arrival in options])
                total = combine(arrivals.min(0)[:, None], self._busy(state[1], stage, bound))
                reached[state] = total.min(0)
                found[state] = (total.argmin(0), [origin for origin, _ in options], arrivals.argmin(0))
            froms.append(found)
        last = min(reached, key=lambda state: reached[state][-1])
        return self._way(last, float(reached[last][-1]), froms)

    def _way(self, state: _State, value: float, froms: list) -> _Way:  # type: ignore[type-arg]
        ends, kinds, end = [], [], self._size - 1
        for found in reversed(froms):
            begin, origins, chosen = found[state]
            ends.append(end)
            kinds.append(state[1])
            end = int(begin[end])
            state = origins[int(chosen[end])]
        return _Way(value, tuple(reversed(ends)), self._members(kinds[::-1]))

    def _members(self, kinds: Sequence[int]) -> tuple[int, ...]:
        left = [list(members) for members in self._kinds]
        return tuple(left[kind].pop(0) for kind in kinds)

    def _next(self, state: _State, stage: int) -> Iterator[int]:
        """Kinds of devices that may compute the next stage."""
        for kind, members in enumerate(self._kinds):
            if state[0][kind] < len(members) and (not self._group.in_order or stage in members):
                yield kind

    def _link(self, sender: int, receiver: int, bound: float) -> _Floats:
        """Seconds that the link between two kinds of devices is busy, for a cut in front of every unit."""
        if sender < 0:
            return np.zeros(self._size)
        one, other = self._kinds[sender][0], self._kinds[receiver][-1]
        seconds = self._group.link_seconds(one, other, self._boundary)
        return np.where(seconds <= bound, seconds, inf)

    def _busy(self, kind: int, stage: int, bound: float) -> _Floats:
        """Seconds of units [i, j) on a kind of device, infinite where they do not fit or are none."""
        key = kind, stage, bound
        if key not in self._busy_known:
            self._busy_known[key] = self._find_busy(kind, stage, bound)
        return self._busy_known[key]

    def _find_busy(self, kind: int, stage: int, bound: float) -> _Floats:
        device = self._kinds[kind][0]
        seconds = self._seconds[None, :, device] - self._seconds[:, None, device]
        needed = self._pair_weights + self._pair_kept * self._held.kept[stage]
        needed += self._boundary[:, None] * self._held.waiting[stage]
        allowed = self._is_later & (needed <= self._group.memory[device]) & (seconds <= bound)
        return np.where(allowed, seconds, inf)


def _prefix(rows: Sequence[Sequence[float]]) -> _Floats:
    table = np.array(rows, dtype=np.float64)
    return np.concatenate((np.zeros((1, table.shape[1])), np.cumsum(table, axis=0)))


def _kinds(units: Sequence[Unit], group: DeviceGroup) -> list[list[int]]:
    """Devices, those together that may be swapped without any difference."""
    if group.in_order:
        return [[device] for device in range(group.size)]
    kinds: list[list[int]] = []
    for device in range(group.size):
        same = next((members for members in kinds if _alike(members[0], device, units, group)), None)
        if same is None:
            kinds.append([device])
        else:
            same.append(device)
    return kinds


def _alike(one: int, other: int, units: Sequence[Unit], group: DeviceGroup) -> bool:
    swap = {one: other, other: one}
    links = all(
        table[i][j] == table[swap.get(i, i)][swap.get(j, j)]
        for table in (group.alpha, group.beta)
        if table
        for i, j in product(range(group.size), repeat=2)
        if i != j
    )
    return (
        links
        and group.memory[one] == group.memory[other]
        and all(unit.seconds[one] == unit.seconds[other] for unit in units)
    )
