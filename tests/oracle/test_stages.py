"""Stages on unequal devices: no other division is faster, by brute force; memory, links and order respected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.oracle import stages
from evener.oracle.stages import DeviceGroup, Held, StageCut, Units, divide
from evener.records.errors import DoesNotFit, InvalidValue

BYTES = ("weight_bytes", "kept_bytes", "boundary_bytes")
ONE_EACH = Held(waiting=(1,) * 8, kept=(1,) * 8)


def units(costs: Sequence[float], speeds: Sequence[float], **columns: Sequence[float]) -> Units:
    """Units of `costs` on devices of `speeds`; other columns are of zeros unless they are given."""
    byte_columns = {name: np.array(columns.get(name, np.zeros(len(costs))), dtype=float) for name in BYTES}
    return Units(seconds=np.array([[cost / speed for speed in speeds] for cost in costs]), **byte_columns)


def team(size: int, in_order: bool = False) -> DeviceGroup:
    return DeviceGroup(memory=(math.inf,) * size, in_order=in_order)


@pytest.mark.parametrize(
    ("costs", "speeds", "ends", "devices", "pace"),
    [
        ([1, 1, 1, 1], [1, 1], (2, 4), (0, 1), 2.0),
        ([1, 1, 1], [1, 0.5], (2, 3), (0, 1), 2.0),
        ([5, 1, 1, 1, 1, 1], [1, 1], (1, 6), (0, 1), 5.0),
        ([1, 1, 4], [0.5, 2.0], (1, 3), (0, 1), 2.5),
        ([4, 1, 1], [0.5, 2.0], (2, 3), (1, 0), 2.5),
        ([2, 3, 4], [1], (3,), (0,), 9.0),
    ],
)
def test_stages_match_literal_divisions(
    costs: list[float], speeds: list[float], ends: tuple[int, ...], devices: tuple[int, ...], pace: float
) -> None:
    found = divide(units(costs, speeds), team(len(speeds)), ONE_EACH, len(speeds))
    assert (found.ends, found.devices, found.pace) == (ends, devices, pace)


def cost_of(division: StageCut, chain: Units, with_links: DeviceGroup, held: Held) -> tuple[float, float]:
    """(pace, seconds of one micro-batch); infinite where a stage is empty or does not fit."""
    busy: list[float] = []
    for k, (begin, end, device) in enumerate(zip((0, *division.ends), division.ends, division.devices, strict=False)):
        boundary = chain.boundary_bytes[begin - 1] if begin else 0.0
        needed = (chain.weight_bytes + held.kept[k] * chain.kept_bytes)[begin:end].sum()
        if begin == end or needed + held.waiting[k] * boundary > with_links.memory[device]:
            return math.inf, math.inf
        busy.append(float(chain.seconds[begin:end, device].sum()))
        if k and with_links.alpha:
            before = division.devices[k - 1]
            busy.append(with_links.alpha[before][device] + boundary * with_links.beta[before][device])
    return max(busy), sum(busy)


def every_division(size: int, stages: int, with_links: DeviceGroup) -> list[StageCut]:
    orders = [tuple(range(stages))] if with_links.in_order else permutations(range(with_links.size), stages)
    return [
        StageCut(ends=(*cuts, size), devices=order, pace=0, seconds=0)
        for order in orders
        for cuts in combinations(range(1, size), stages - 1)
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Units, DeviceGroup, Held, int]:
    size, devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=devices, max_size=devices))
    costs, *small = (draw(st.lists(st.integers(0, most), min_size=size, max_size=size)) for most in (9, 5, 5, 5))
    chain = units(costs, speeds, **dict(zip(BYTES, small, strict=True)))
    table = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=devices, max_size=devices).map(tuple)
    square = st.lists(table, min_size=devices, max_size=devices).map(tuple)
    linked = draw(st.booleans())
    members = DeviceGroup(
        memory=tuple(draw(st.sampled_from([25.0, math.inf])) for _ in range(devices)),
        alpha=draw(square) if linked else (),
        beta=draw(square) if linked else (),
        in_order=draw(st.booleans()),
    )
    held = Held(waiting=(2, 2, 1, 1), kept=tuple(draw(st.integers(1, 3)) for _ in range(4)))
    return chain, members, held, draw(st.integers(1, min(size, devices)))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_no_other_division_is_faster(problem: tuple[Units, DeviceGroup, Held, int]) -> None:
    chain, members, held, stages = problem
    every = [cost_of(division, chain, members, held) for division in every_division(len(chain), stages, members)]
    best = min(every)
    if best[0] == math.inf:
        with pytest.raises(DoesNotFit):
            divide(chain, members, held, stages)
        return
    found = divide(chain, members, held, stages)
    assert (found.pace, found.seconds) == pytest.approx(best)
    assert cost_of(found, chain, members, held) == pytest.approx(best)


@given(problems())
def test_tables_computed_in_strips_are_equal_to_whole_ones(problem: tuple[Units, DeviceGroup, Held, int]) -> None:
    def found() -> StageCut | str:
        try:
            return divide(*problem)
        except DoesNotFit as error:
            return str(error)

    whole = found()
    for most in (1, 7):
        with mock.patch.object(stages, "_MAX_TABLE_FLOATS", most):
            assert found() == whole


def test_unprofitable_devices_are_left_out_if_the_number_is_free() -> None:
    slow_link = DeviceGroup(memory=(math.inf,) * 2, alpha=((0, 9), (9, 0)), beta=((0, 0), (0, 0)))
    found = divide(units([1, 1, 1], [1, 1]), slow_link, ONE_EACH)
    assert (found.ends, len(found.devices), found.pace) == ((3,), 1, 3.0)


def test_memory_moves_a_cut_away_from_the_fastest_position() -> None:
    chain = units([1] * 4, [1, 1], weight_bytes=[10] * 4)
    tight = DeviceGroup(memory=(10, 30))
    assert divide(chain, tight, ONE_EACH, 2).ends == (1, 4)
    with pytest.raises(DoesNotFit):
        divide(chain, DeviceGroup(memory=(10, 20)), ONE_EACH, 2)


def test_pipeline_emits_micro_batches_at_the_pace_of_its_slowest_stage() -> None:
    found = divide(units([2, 3, 2, 3], [1, 1]), team(2), ONE_EACH, 2)
    assert (found.pace, found.seconds) == (5.0, 10.0)


def test_dividing_thousands_of_units_takes_seconds_at_most() -> None:
    found = divide(units([1.0 + i % 7 for i in range(1200)], [1.0] * 8), team(8), ONE_EACH, 8)
    assert found.pace == pytest.approx(sum(1.0 + i % 7 for i in range(1200)) / 8, rel=0.02)


@pytest.mark.parametrize("stages", [0, 3])
def test_impossible_numbers_of_stages_are_refused(stages: int) -> None:
    with pytest.raises(InvalidValue) as caught:
        divide(units([1, 1], [1, 1, 1]), team(3), ONE_EACH, stages)
    assert (caught.value.field, caught.value.value) == ("stages", stages)
