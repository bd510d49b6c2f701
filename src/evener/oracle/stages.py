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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from evener.records.errors import DoesNotFit, require

_Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """What lies between neighbouring places where a model may be cut, in columns, for one micro-batch.

    Attributes:
        seconds: forward and backward, [units, devices].
        weight_bytes: of weights, gradients and the optimiser's state.
        kept_bytes: of activations that backward needs.
        boundary_bytes: of what lives across the cut behind each, and has to travel if it is cut there.
    """

    seconds: _Floats
    weight_bytes: _Floats
    kept_bytes: _Floats
    boundary_bytes: _Floats

    def __post_init__(self) -> None:
        allowed = bool(((self.seconds >= 0) & (self.seconds < inf)).all())
        require(allowed, "seconds", self.seconds.tolist(), "zero or more and finite")

    def __len__(self) -> int:
        return len(self.seconds)


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


def divide(units: Units, group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut:
    """The division of `units` into stages of the fastest pace; arguments as of `best_cut`.

    Raises:
        DoesNotFit: no division fits the memory of the devices.
    """
    cut = best_cut(units, group, held, stages)
    if cut is None:
        raise DoesNotFit(f"no division of the model into {stages or 'any number of'} stages fits the devices' memory")
    return cut


def best_cut(units: Units, group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut | None:
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
    pace = min(seconds for seconds, *_ in _ends(chain.reach(stages or most, np.maximum, inf), stages))
    if pace == inf:
        return None
    reached = chain.reach(stages or most, np.add, pace)
    seconds, count, state = min(_ends(reached, stages), key=itemgetter(0))
    ends, devices = chain.way(reached, count, state, pace)
    return StageCut(ends=ends, devices=devices, pace=pace, seconds=seconds)


_MOST_FLOATS = 2**24
"""That are held at a time for a table of units by units: of a model of thousands, it is made in strips."""
_ALL = slice(None)
_State: TypeAlias = tuple[tuple[int, ...], int]
"""(how many devices of every kind are used, kind of the last one)"""
_Reached: TypeAlias = list[dict[_State, _Floats]]
"""After 0, 1, 2 ... stages, by state: the least value with which these stages hold the first 0, 1, 2 ... units."""


def _ends(reached: _Reached, stages: int | None) -> list[tuple[float, int, _State]]:
    """(value, number of stages, state) of everything that holds all units."""
    counts = range(1, len(reached)) if stages is None else [stages]
    return [(float(values[-1]), count, state) for count in counts for state, values in reached[count].items()]


class _Chain:
    """The units as prefix sums, and the search over them."""

    def __init__(self, units: Units, group: DeviceGroup, held: Held) -> None:
        self._group, self._held = group, held
        self._kinds = _kinds(units, group)
        self._seconds, self._weights, self._kept = (
            np.concatenate((np.zeros((1, *column.shape[1:])), np.cumsum(column, axis=0)))
            for column in (units.seconds, units.weight_bytes, units.kept_bytes)
        )
        self._boundary = np.concatenate(([0.0], units.boundary_bytes))
        self._numbers = np.arange(len(units) + 1)
        self._busy: dict[tuple[int, int, int], _Floats] = {}

    def reach(self, stages: int, combine: Callable[[_Floats, _Floats], _Floats], bound: float) -> _Reached:
        """The least values of up to `stages` stages: of all busy times, each at most `bound`, combined."""
        start = np.full(len(self._boundary), inf)
        start[0] = 0.0
        reached: _Reached = [{((0,) * len(self._kinds), -1): start}]
        for stage in range(stages):
            begun: dict[_State, _Floats] = {}
            for state, values in reached[stage].items():
                for after in self._next(state, stage):
                    arrival = combine(values, self._link(state[1], after[1], bound))
                    begun[after] = np.minimum(begun[after], arrival) if after in begun else arrival
            reached.append({
                state: self._least(state[1], stage, arrival, combine, bound) for state, arrival in begun.items()
            })  # fmt: skip
        return reached

    def _least(
        self, kind: int, stage: int, arrival: _Floats, combine: Callable[[_Floats, _Floats], _Floats], bound: float
    ) -> _Floats:
        """The least value behind `stage`, over all units that it may begin with."""
        begins = np.flatnonzero(arrival < inf)
        if not len(begins):
            return arrival
        least = np.full(len(arrival), inf)
        rows = max(1, _MOST_FLOATS // len(arrival))
        for first in range(int(begins[0]), int(begins[-1]) + 1, rows):
            some = slice(first, min(first + rows, int(begins[-1]) + 1))
            busy = self._find_busy(kind, stage, some)
            total = combine(arrival[some, None], np.where(busy <= bound, busy, inf) if bound < inf else busy)
            least = np.minimum(least, total.min(axis=0))
        return least

    def way(
        self, reached: _Reached, count: int, state: _State, bound: float
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ends, devices) of the `count` stages of least sum that lead to `state`."""
        ends, kinds = [len(self._boundary) - 1], [state[1]]
        for stage in reversed(range(1, count)):
            busy = self._find_busy(kinds[0], stage, slice(None), slice(ends[0], ends[0] + 1))[:, 0]
            origins = [origin for origin in reached[stage] if state in self._next(origin, stage)]
            arrivals = np.stack([reached[stage][o] + self._link(o[1], kinds[0], bound) for o in origins])
            begin = int((arrivals.min(axis=0) + np.where(busy <= bound, busy, inf)).argmin())
            state = origins[int(arrivals[:, begin].argmin())]
            ends.insert(0, begin)
            kinds.insert(0, state[1])
        left = [list(members) for members in self._kinds]
        return tuple(ends), tuple(left[kind].pop(0) for kind in kinds)

    def _next(self, state: _State, stage: int) -> list[_State]:
        """What `state` may become by the next stage."""
        used, _ = state
        return [
            ((*used[:kind], used[kind] + 1, *used[kind + 1 :]), kind)
            for kind, members in enumerate(self._kinds)
            if used[kind] < len(members) and (not self._group.in_order or stage in members)
        ]

    def _link(self, sender: int, receiver: int, bound: float) -> _Floats:
        """Seconds that the link between two kinds of devices is busy, for a cut in front of every unit."""
        if sender < 0 or not self._group.alpha:
            return np.zeros(len(self._boundary))
        one, other = self._kinds[sender][0], self._kinds[receiver][-1]
        seconds = self._group.alpha[one][other] + self._boundary * self._group.beta[one][other]
        return np.where(seconds <= bound, seconds, inf)

    def _find_busy(self, kind: int, stage: int, rows: slice, columns: slice = _ALL) -> _Floats:
        """Seconds of units [i, j) on a kind of device, infinite where they do not fit or are none: some i by some j."""
        key = kind, self._held.kept[stage], self._held.waiting[stage]
        if len(self._numbers) ** 2 > _MOST_FLOATS:
            return self._busy_of(*key, rows, columns)
        if key not in self._busy:
            self._busy[key] = self._busy_of(*key, _ALL, _ALL)
        return self._busy[key][rows, columns]

    def _busy_of(self, kind: int, kept: int, waiting: int, rows: slice, columns: slice) -> _Floats:
        device = self._kinds[kind][0]
        seconds: _Floats = self._seconds[None, columns, device] - self._seconds[rows, None, device]
        held = self._weights + self._kept * kept
        needed = held[None, columns] - (held - self._boundary * waiting)[rows, None]
        is_empty = self._numbers[None, columns] <= self._numbers[rows, None]
        seconds[is_empty | (needed > self._group.memory[device])] = inf
        return seconds


def _kinds(units: Units, group: DeviceGroup) -> list[list[int]]:
    """Devices, those together that may be swapped without any difference."""
    kinds: list[list[int]] = []
    for device in range(group.size):
        same = (members for members in kinds if not group.in_order and _alike(members[0], device, units, group))
        found = next(same, None)
        if found is None:
            kinds.append([device])
        else:
            found.append(device)
    return kinds


def _alike(one: int, other: int, units: Units, group: DeviceGroup) -> bool:
    swap = {one: other, other: one}
    return (
        group.memory[one] == group.memory[other]
        and np.array_equal(units.seconds[:, one], units.seconds[:, other])
        and all(
            table[i][j] == table[swap.get(i, i)][swap.get(j, j)]
            for table in (group.alpha, group.beta)
            if table
            for i, j in permutations(range(group.size), 2)
        )
    )
