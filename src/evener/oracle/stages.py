"""Divides a chain of layers into consecutive stages on unequal devices so that the slowest stage is as fast as
possible.

A stage k on device d that holds units i to j is busy, for every micro-batch, for the seconds of its units on d. The
link to it is busy for alpha + bytes * beta, for the tensors that cross the cut in front of it. The slowest stage or
link sets the pace of the pipeline. A stage must fit its device's memory. The order of the devices is chosen, too.

The solution is exact, by dynamic programming over (devices used so far, last device, units so far):

    pace(S + d, d, j) = min over a, i of  max(pace(S, a, i), link(a, d, i), seconds(d, i, j))

Identical devices are interchangeable. Among divisions of equal pace, a second pass with sums in place of maxima takes
the one with the shortest time through the pipeline. O(sets of devices * devices * units^2).
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
    """The units between possible cuts of a model, as columns, for one micro-batch.

    Attributes:
        seconds: forward and backward, [units, devices].
        weight_bytes: weights, gradients and optimizer state of each unit.
        kept_bytes: activations that backward needs.
        boundary_bytes: tensors that cross the cut behind each unit and travel if the model is cut there.
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
    """The devices and their links.

    Attributes:
        memory: bytes of each device that a stage may use.
        alpha: seconds of latency from device to device; a row for every sender.
        beta: seconds per byte from device to device; a row for every sender.
        in_order: whether device d computes stage d; otherwise the best order is chosen.
    """

    memory: tuple[float, ...]
    alpha: tuple[tuple[float, ...], ...] = ()
    beta: tuple[tuple[float, ...], ...] = ()
    in_order: bool = False

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.memory)

    def of(self, devices: Sequence[int]) -> DeviceGroup:
        """Return the group of some `devices` of this group, in that order."""
        alpha, beta = (
            tuple(tuple(table[i][j] for j in devices) for i in devices) if table else ()
            for table in (self.alpha, self.beta)
        )
        memory = tuple(self.memory[device] for device in devices)
        return DeviceGroup(memory=memory, alpha=alpha, beta=beta, in_order=self.in_order)


@dataclass(frozen=True, kw_only=True)
class Held:
    """How many micro-batches each stage holds at once.

    Attributes:
        waiting: micro-batches whose inputs a stage holds between forward and backward, one number a stage.
        kept: micro-batches whose activations a stage holds, fewer where they are recomputed; one number a stage.
    """

    waiting: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """A chain of units, divided into stages.

    Attributes:
        ends: stage k holds units ends[k-1] to ends[k] (the first one from 0).
        devices: device of each stage, in order.
        pace: seconds between two micro-batches, which the slowest stage or link sets.
        seconds: seconds of one micro-batch through all stages and links.
    """

    ends: tuple[int, ...]
    devices: tuple[int, ...]
    pace: float
    seconds: float


def divide(units: Units, group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut:
    """Return the division of `units` into stages with the fastest pace; the arguments are those of `best_cut`.

    Raises:
        DoesNotFit: no division fits the memory of the devices.
    """
    cut = best_cut(units, group, held, stages)
    if cut is None:
        raise DoesNotFit(f"no division of the model into {stages or 'any number of'} stages fits the devices' memory")
    return cut


def best_cut(units: Units, group: DeviceGroup, held: Held, stages: int | None = None) -> StageCut | None:
    """Return the division of `units` into stages with the fastest pace; None if none fits the memory of the devices.

    Args:
        units: units in order.
        group: devices; every unit has one entry of `seconds` per device.
        held: micro-batches held by stage, for the largest possible number of stages.
        stages: number of stages; by default the best number, at most one a device.
    """
    max_stages = min(group.size, len(units), len(held.kept))
    require(stages is None or 1 <= stages <= max_stages, "stages", stages, f"1 to {max_stages}, or None")
    chain = _Chain(units, group, held)
    pace = min(seconds for seconds, *_ in _ends(chain.reach(stages or max_stages, np.maximum, inf), stages))
    if pace == inf:
        return None
    reached = chain.reach(stages or max_stages, np.add, pace)
    seconds, count, state = min(_ends(reached, stages), key=itemgetter(0))
    ends, devices = chain.trace_back(reached, count, state, pace)
    return StageCut(ends=ends, devices=devices, pace=pace, seconds=seconds)


_MAX_TABLE_FLOATS = 2**24
"""Largest table of units by units that is held at once; the table of a model with thousands of units is made in strips.
"""
_ALL = slice(None)
_State: TypeAlias = tuple[tuple[int, ...], int]
"""(how many devices of every kind are used, kind of the last one)"""
_Reached: TypeAlias = list[dict[_State, _Floats]]
"""After 0, 1, 2 ... stages, by state: the least value with which these stages hold the first 0, 1, 2 ... units."""


def _ends(reached: _Reached, stages: int | None) -> list[tuple[float, int, _State]]:
    """Return (value, number of stages, state) of every state that holds all units."""
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
        """Return the least values of up to `stages` stages: combined busy times, each at most `bound`."""
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
        """Return the least value behind `stage`, over all units with which it may begin."""
        begins = np.flatnonzero(arrival < inf)
        if not len(begins):
            return arrival
        least = np.full(len(arrival), inf)
        rows = max(1, _MAX_TABLE_FLOATS // len(arrival))
        for first in range(int(begins[0]), int(begins[-1]) + 1, rows):
            some = slice(first, min(first + rows, int(begins[-1]) + 1))
            busy = self._find_busy(kind, stage, some)
            total = combine(arrival[some, None], np.where(busy <= bound, busy, inf) if bound < inf else busy)
            least = np.minimum(least, total.min(axis=0))
        return least

    def trace_back(
        self, reached: _Reached, count: int, state: _State, bound: float
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (ends, devices) of the `count` stages of least sum that lead to `state`."""
        ends, kinds = [len(self._boundary) - 1], [state[1]]
        for stage in reversed(range(1, count)):
            busy = self._find_busy(kinds[0], stage, slice(None), slice(ends[0], ends[0] + 1))[:, 0]
            origins = [origin for origin in reached[stage] if state in self._next(origin, stage)]
            arrivals = np.stack([reached[stage][o] + self._link(o[1], kinds[0], bound) for o in origins])
            begin = int((arrivals.min(axis=0) + np.where(busy <= bound, busy, inf)).argmin())
            state = origins[int(arrivals[:, begin].argmin())]
            ends.insert(0, begin)
            kinds.insert(0, state[1])
        unused = [list(members) for members in self._kinds]
        return tuple(ends), tuple(unused[kind].pop(0) for kind in kinds)

    def _next(self, state: _State, stage: int) -> list[_State]:
        """Return the states that can follow `state` with the next stage."""
        used, _ = state
        return [
            ((*used[:kind], used[kind] + 1, *used[kind + 1 :]), kind)
            for kind, members in enumerate(self._kinds)
            if used[kind] < len(members) and (not self._group.in_order or stage in members)
        ]

    def _link(self, sender: int, receiver: int, bound: float) -> _Floats:
        """Return the seconds that the link between two kinds of devices is busy, for a cut in front of every unit."""
        if sender < 0 or not self._group.alpha:
            return np.zeros(len(self._boundary))
        first, second = self._kinds[sender][0], self._kinds[receiver][-1]
        seconds = self._group.alpha[first][second] + self._boundary * self._group.beta[first][second]
        return np.where(seconds <= bound, seconds, inf)

    def _find_busy(self, kind: int, stage: int, rows: slice, columns: slice = _ALL) -> _Floats:
        """Return the seconds of units [i, j) on a kind of device, [rows, columns]; infinite where they are empty or do
        not fit.
        """
        key = kind, self._held.kept[stage], self._held.waiting[stage]
        if len(self._numbers) ** 2 > _MAX_TABLE_FLOATS:
            return self._busy_of(*key, rows, columns)
        if key not in self._busy:
            self._busy[key] = self._busy_of(*key, _ALL, _ALL)
        return self._busy[key][rows, columns]

    def _busy_of(self, kind: int, num_kept: int, num_waiting: int, rows: slice, columns: slice) -> _Floats:
        device = self._kinds[kind][0]
        seconds: _Floats = self._seconds[None, columns, device] - self._seconds[rows, None, device]
        held = self._weights + self._kept * num_kept
        needed = held[None, columns] - (held - self._boundary * num_waiting)[rows, None]
        is_empty = self._numbers[None, columns] <= self._numbers[rows, None]
        seconds[is_empty | (needed > self._group.memory[device])] = inf
        return seconds


def _kinds(units: Units, group: DeviceGroup) -> list[list[int]]:
    """Return the devices, grouped by kind; devices of one kind are interchangeable."""
    kinds: list[list[int]] = []
    for device in range(group.size):
        same = (members for members in kinds if not group.in_order and _alike(members[0], device, units, group))
        kind = next(same, None)
        if kind is None:
            kinds.append([device])
        else:
            kind.append(device)
    return kinds


def _alike(first: int, second: int, units: Units, group: DeviceGroup) -> bool:
    swap = {first: second, second: first}
    return (
        group.memory[first] == group.memory[second]
        and np.array_equal(units.seconds[:, first], units.seconds[:, second])
        and all(
            table[i][j] == table[swap.get(i, i)][swap.get(j, j)]
            for table in (group.alpha, group.beta)
            if table
            for i, j in permutations(range(group.size), 2)
        )
    )
