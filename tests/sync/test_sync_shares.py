"""Who is faster gets more, all finish together, and noise moves nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle import Worker, apportion
from evener.sync import Agreement, Sgd
from evener.sync.shares import Division, divide, local_steps, wanted_samples
from evener.sync.speeds import Speeds

SGD = Sgd(learning_rate=0.1)


def costs(*seconds: float, most: int | None = None) -> list[Worker]:
    return [Worker(unit_seconds=s, most=most) for s in seconds]


@pytest.mark.parametrize(
    ("most", "seconds", "expected"),
    [
        (10, (1.0, 2.0, 4.0), (10, 5, 2)),
        (10, (2.0, 1.0), (5, 10)),
        (500, (1.0, 1.01), (500, 495)),
        (2, (1.0, 1.01), (2, 2)),
        (3, (1.0, 100.0), (3, 1)),
        (1, (5.0, 1.0), (1, 1)),
    ],
)
def test_a_node_half_as_fast_does_half_the_steps(
    most: int, seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert local_steps(most, costs(*seconds)) == expected


def agreement(**knobs: object) -> Agreement:
    return Agreement(batch=12, outer=SGD, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "team", "left", "expected"),
    [
        (agreement(), costs(1, 2), (100, 100), (12, 12)),
        (agreement(), costs(1, 2, most=5), (100, 3), (5, 3)),
        (agreement(staleness=None), costs(1, 2), (100, 7), (12, 7)),
        (agreement(division="fixed"), costs(1, 1), (100, 7), (12, 7)),
        (agreement(contribution="delta", local_steps=4), costs(1, 2), (100, 100), (48, 24)),
        (agreement(contribution="delta", local_steps=4), costs(1, 2), (30, 30), (30, 24)),
        (agreement(contribution="delta", local_steps="epoch"), costs(1, 2), (30, 9), (30, 9)),
    ],
)
def test_what_each_may_use_in_a_round(
    of: Agreement, team: list[Worker], left: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert wanted_samples(of, team, left) == expected


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 60), st.floats(0.1, 10)), min_size=1, max_size=5))
def test_nobody_gets_more_than_it_wanted_and_nothing_is_left_over(total: int, team: list[tuple[int, float]]) -> None:
    wanted = [n for n, _ in team]
    shares = divide(total, wanted, costs(*(s for _, s in team)))
    assert sum(shares) == min(total, sum(wanted))
    assert all(0 <= n <= w for n, w in zip(shares, wanted, strict=True))


def test_a_division_moves_when_a_node_slows_down_and_not_for_noise() -> None:
    division, names, wanted = Division(), ["a", "b"], [128, 128]
    assert division.divide(128, wanted, costs(1, 1), names) == (64, 64)
    for k in range(40):
        assert division.divide(128, wanted, costs(1 + 0.03 * (k % 2), 1), names) == (64, 64)
    moved = [division.divide(128, wanted, costs(1, 3), names) for _ in range(10)]
    assert moved[-1] == (96, 32)


def test_a_division_is_made_anew_at_once_for_others_or_another_total() -> None:
    division = Division()
    assert division.divide(12, [12, 12], costs(1, 2), ["a", "b"]) == (8, 4)
    assert division.divide(12, [12, 12], costs(2, 1), ["a", "c"]) == (4, 8)
    assert division.divide(9, [12, 12], costs(2, 1), ["a", "c"]) == (3, 6)
    assert division.divide(9, [12, 2], costs(2, 1), ["a", "c"]) == (7, 2)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=5), st.integers(20, 300))
def test_a_kept_division_is_never_much_slower_than_the_best(seconds: list[float], total: int) -> None:
    division, names = Division(), [str(i) for i in range(len(seconds))]
    wanted = [total] * len(seconds)
    for _ in range(12):
        division.divide(total, wanted, costs(*([1.0] * len(seconds))), names)
    team = costs(*seconds)
    shares = division.divide(total, wanted, team, names)
    best = apportion(total, team)
    finish = max(w.seconds(n) for w, n in zip(team, shares, strict=True) if n)
    soonest = max(w.seconds(n) for w, n in zip(team, best, strict=True) if n)
    assert finish <= 1.05 * soonest + max(seconds)


def test_speeds_are_believed_as_benchmarked_then_as_measured_and_smoothed() -> None:
    speeds = Speeds()
    assert [cost.unit_seconds for cost in speeds.costs(["a", "b"])] == [1.0, 1.0]
    speeds.expect("a", Worker(unit_seconds=0.5, fixed_seconds=0.1, most=64))
    assert speeds.costs(["a", "b"]) == [Worker(unit_seconds=0.5, fixed_seconds=0.1, most=64), Worker(unit_seconds=0.5)]
    speeds.observe("a", 10, 10.0)
    assert speeds.costs(["a"])[0] == Worker(unit_seconds=0.625, fixed_seconds=0.1, most=64)
    for _ in range(40):
        speeds.observe("a", 10, 10.0)
    assert speeds.unit_seconds["a"] == pytest.approx(1.0, abs=1e-4)
    speeds.expect("a", Worker(unit_seconds=7.0, most=32))
    assert speeds.costs(["a"])[0].unit_seconds == pytest.approx(1.0, abs=1e-4)
    assert speeds.costs(["a"])[0].most == 32


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_not_believed(seconds: float) -> None:
    speeds = Speeds()
    speeds.observe("a", 10, seconds)
    speeds.observe("b", 0, 1.0)
    assert speeds.unit_seconds == {}
