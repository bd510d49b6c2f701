"""D'Hondt's rule: no other division finishes earlier."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.apportion import NodeCost, apportion, finish_seconds, weights_to_workers
from evener.records.errors import DoesNotFit, InvalidValue

seconds = st.floats(min_value=1e-4, max_value=1e3, allow_nan=False)
workers = st.lists(
    st.builds(
        lambda unit, fixed, most: NodeCost(unit_seconds=unit, fixed_seconds=fixed, max_units=most),
        seconds,
        st.floats(min_value=0, max_value=10),
        st.none() | st.integers(min_value=0, max_value=20),
    ),
    min_size=1,
    max_size=5,
)


def speeds(*values: float) -> list[NodeCost]:
    return [NodeCost(unit_seconds=1 / v) for v in values]


@pytest.mark.parametrize(
    ("total", "team", "expected"),
    [
        (7, speeds(4, 2, 1), (4, 2, 1)),
        (224, speeds(1.0, 0.5, 0.25), (128, 64, 32)),
        (10, speeds(7, 2, 1), (7, 2, 1)),
        (3, speeds(1, 1), (2, 1)),
        (0, speeds(1, 2), (0, 0)),
        (1, speeds(1, 100), (0, 1)),
        (10, [NodeCost(unit_seconds=1, max_units=2), NodeCost(unit_seconds=5)], (2, 8)),
        (4, [NodeCost(unit_seconds=1, fixed_seconds=10), NodeCost(unit_seconds=1)], (0, 4)),
    ],
)
def test_divisions_match_literal_values(total: int, team: list[NodeCost], expected: tuple[int, ...]) -> None:
    assert apportion(total, team) == expected


@given(st.integers(min_value=0, max_value=60), workers)
def test_shares_sum_to_the_whole_and_respect_memory(total: int, team: list[NodeCost]) -> None:
    if sum(w.capacity for w in team) < total:
        with pytest.raises(DoesNotFit):
            apportion(total, team)
        return
    shares = apportion(total, team)
    assert sum(shares) == total
    assert all(0 <= n <= w.capacity for n, w in zip(shares, team, strict=True))


@given(st.integers(min_value=1, max_value=7), st.lists(seconds, min_size=1, max_size=3))
def test_no_other_division_finishes_sooner(total: int, units: list[float]) -> None:
    team = [NodeCost(unit_seconds=u, fixed_seconds=i * 0.1) for i, u in enumerate(units)]
    best = min(_busy(shares, team) for shares in product(range(total + 1), repeat=len(team)) if sum(shares) == total)
    assert _busy(apportion(total, team), team) == pytest.approx(best, rel=1e-9)


def _busy(shares: tuple[int, ...], team: list[NodeCost]) -> float:
    return max((w.seconds(n) for n, w in zip(shares, team, strict=True) if n), default=0.0)


@given(st.integers(min_value=0, max_value=2000), st.lists(st.floats(0.01, 100), min_size=2, max_size=8))
def test_a_faster_device_never_gets_less(total: int, values: list[float]) -> None:
    shares = apportion(total, speeds(*values))
    ordered = sorted(zip(values, shares, strict=True))
    for (slow, less), (fast, more) in pairwise(ordered):
        assert less <= more or slow == fast


@given(st.integers(min_value=0, max_value=500), st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_only_ratios_of_speeds_matter(total: int, values: list[int]) -> None:
    assert apportion(total, speeds(*values)) == apportion(total, speeds(*(v * 4.0 for v in values)))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(sum))
def test_weights_that_sum_to_the_total_are_met_exactly(weights: list[int]) -> None:
    assert apportion(sum(weights), weights_to_workers(weights, [None] * len(weights))) == tuple(weights)


def test_a_million_samples_take_no_longer_than_a_few() -> None:
    shares = apportion(10**9, speeds(*range(1, 65)))
    assert sum(shares) == 10**9
    assert shares[63] / shares[0] == pytest.approx(64, rel=1e-6)


def test_the_finish_time_is_that_of_the_slowest_worker() -> None:
    assert finish_seconds((1, 3), [NodeCost(unit_seconds=2), NodeCost(unit_seconds=1, fixed_seconds=0.5)]) == 3.5


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(bad: float) -> None:
    with pytest.raises(InvalidValue) as caught:
        NodeCost(unit_seconds=bad)
    assert caught.value.field == "unit_seconds"


def test_workers_receive_their_minimum_if_there_are_enough_units() -> None:
    workers = [NodeCost(unit_seconds=1.0, min_units=2), NodeCost(unit_seconds=100.0, min_units=2)]
    assert apportion(64, workers) == (62, 2)
    assert apportion(3, workers) == (3, 0)
    assert apportion(4, [*workers[:1], NodeCost(unit_seconds=1.0, min_units=2, max_units=2)]) == (2, 2)
    with pytest.raises(InvalidValue) as caught:
        NodeCost(unit_seconds=1.0, min_units=3, max_units=2)
    assert (caught.value.field, caught.value.value) == ("min_units", 3)
