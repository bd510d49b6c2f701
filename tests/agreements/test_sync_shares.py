"""Who is faster gets more, all finish together, and noise moves nothing."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.agreements.data_assigner import (
    CachedDivision,
    divide,
    full_samples,
    wanted_samples,
    with_trials,
)
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Sgd
from evener.agreements.worker_record import SpeedEstimate, fixed_samples_of, seconds_of
from evener.oracle.apportion import NodeCost, apportion, finish_seconds, local_steps
from support.server_inboxes import Desk

SGD = Sgd(learning_rate=0.1)


def costs(*seconds: float) -> list[float]:
    return list(seconds)


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
def test_node_of_half_the_speed_does_half_the_steps(
    most: int, seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert local_steps(most, costs(*seconds)) == expected


def agreement(**knobs: object) -> AgreementSettings:
    return AgreementSettings(batch=12, outer=SGD, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "team", "left", "expected"),
    [
        (agreement(), costs(1, 2), 100, (12, 12)),
        (agreement(), costs(1, 2), 3, (3, 3)),
        (agreement(staleness=None), costs(1, 2), 100, (12, 12)),
        (agreement(division="fixed"), costs(1, 1), 7, (7, 7)),
        (agreement(contribution="delta", local_steps=4), costs(1, 2), 100, (48, 24)),
        (agreement(contribution="delta", local_steps=4), costs(1, 2), 30, (30, 24)),
        (agreement(contribution="delta", local_steps="epoch"), costs(1, 2), 30, (30, 30)),
    ],
)
def test_wanted_samples_follow_protocol_speed_and_remainder(
    of: AgreementSettings, team: list[float], left: int, expected: tuple[int, ...]
) -> None:
    assert wanted_samples(of, team, left) == expected


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 60), st.floats(0.1, 10)), min_size=1, max_size=5))
def test_division_respects_wanted_samples_and_leaves_no_rest(total: int, team: list[tuple[int, float]]) -> None:
    wanted = [n for n, _ in team]
    shares = divide(total, wanted, costs(*(s for _, s in team)))
    assert sum(shares) == min(total, sum(wanted))
    assert all(0 <= n <= w for n, w in zip(shares, wanted, strict=True))


def test_division_follows_a_slow_down_but_not_noise() -> None:
    division, names, wanted = CachedDivision(), ["a", "b"], [128, 128]
    assert division.divide(128, wanted, costs(1, 1), names) == (64, 64)
    for k in range(40):
        assert division.divide(128, wanted, costs(1 + 0.03 * (k % 2), 1), names) == (64, 64)
    moved = [division.divide(128, wanted, costs(1, 3), names) for _ in range(10)]
    assert moved[-1] == (96, 32)


def test_division_changes_at_once_with_nodes_or_total() -> None:
    division = CachedDivision()
    assert division.divide(12, [12, 12], costs(1, 2), ["a", "b"]) == (8, 4)
    assert division.divide(12, [12, 12], costs(2, 1), ["a", "c"]) == (4, 8)
    assert division.divide(9, [12, 12], costs(2, 1), ["a", "c"]) == (3, 6)
    assert division.divide(9, [12, 2], costs(2, 1), ["a", "c"]) == (7, 2)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=5), st.integers(20, 300))
def test_cached_division_is_never_much_slower_than_the_best(seconds: list[float], total: int) -> None:
    division, names = CachedDivision(), [str(i) for i in range(len(seconds))]
    wanted = [total] * len(seconds)
    for _ in range(12):
        division.divide(total, wanted, costs(*([1.0] * len(seconds))), names)
    team = costs(*seconds)
    shares = division.divide(total, wanted, team, names)
    best = apportion(total, [NodeCost(unit_seconds=each) for each in team])
    finish = max(each * n for each, n in zip(team, shares, strict=True))
    soonest = max(each * n for each, n in zip(team, best, strict=True))
    assert finish <= 1.05 * soonest + max(seconds)


def test_idle_node_is_tried_again_and_used_once_it_is_fast() -> None:
    division, names = CachedDivision(), ["a", "b"]
    speeds = {"a": SpeedEstimate(), "b": SpeedEstimate()}
    speeds["a"].benchmark(1.0)
    speeds["b"].benchmark(60.0)  # it was stopped while it was measured
    rounds = []
    for _ in range(1000):
        shares = division.divide(12, [12, 12], seconds_of(list(speeds.values())), names)
        assert sum(shares) == 12
        rounds.append(shares[1])
        for name, n in zip(names, shares, strict=True):
            if n:
                speeds[name].observe(n, float(n))
    assert rounds[:101] == [0] * 100 + [1]  # 60 s of trial in 100 rounds of 12 s are 5 %
    assert rounds.count(1) > 1
    assert rounds[-1] == 6


@pytest.mark.parametrize(
    ("shares", "wanted", "seconds", "idle", "expected"),
    [
        ((12, 0), (12, 12), (1, 13), (0, 49), (12, 0)),
        ((12, 0), (12, 12), (1, 13), (0, 50), (11, 1)),
        ((12, 0), (12, 0), (1, 13), (0, 50), (12, 0)),
        ((12, 0), (12, 12), (1, 600), (0, 999), (12, 0)),
        ((12, 0), (12, 12), (1, 600), (0, 1000), (11, 1)),
        ((5, 6, 0, 0), (9, 9, 9, 9), (1, 1, 7, 7), (0, 0, 80, 80), (4, 5, 1, 1)),
        ((1, 0), (1, 1), (1, 2), (0, 50), (0, 1)),
        ((1, 0, 0), (1, 1, 1), (1, 2, 2), (0, 50, 50), (0, 1, 0)),
    ],
)
def test_idle_node_gets_a_trial_sample_at_low_cost(
    shares: tuple[int, ...],
    wanted: tuple[int, ...],
    seconds: tuple[float, ...],
    idle: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    assert with_trials(shares, wanted, costs(*seconds), idle) == expected


@pytest.mark.parametrize("known", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("fixed", [0.0, 20.0, 100.0])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.25), (1.0, 0.5, 0.25)], ids=str)
def test_shares_stay_good_if_much_of_a_step_is_fixed(speeds: tuple[float, ...], fixed: float, known: float) -> None:
    """The machine is busy, and the fixed part is known to 50 %. By proportional costs some take three times as long."""
    estimates, division, random = [SpeedEstimate() for _ in speeds], CachedDivision(), Random(1)
    names, batch, seconds = [str(i) for i in range(len(speeds))], 32, list[float]()
    for one, speed in zip(estimates, speeds, strict=True):
        one.benchmark((fixed + batch) / batch / speed)
    for _ in range(600):
        shares = division.divide(batch, [batch] * len(speeds), seconds_of(estimates), names, known * fixed)
        seconds.append(max((fixed + n) / speed for n, speed in zip(shares, speeds, strict=True) if n))
        for one, speed, n in zip(estimates, speeds, shares, strict=True):
            disturbed = random.uniform(1.0, 1.5) * (4.0 if random.random() < 0.1 else 1.0)
            if n:
                one.observe(full_samples(n, 1, known * fixed, batch), disturbed * (fixed + n) / speed)
    team = [NodeCost(unit_seconds=1 / speed, fixed_seconds=fixed / speed) for speed in speeds]
    assert mean(seconds[300:]) < 1.3 * finish_seconds(apportion(batch, team), team)


def test_fixed_part_is_the_lower_median_of_what_nodes_report() -> None:
    estimates = [SpeedEstimate() for _ in range(4)]
    assert fixed_samples_of(estimates) == 0.0
    for one, fixed in zip(estimates, (7.0, 1e9, 5.0), strict=False):
        one.fixed_samples = fixed
    assert fixed_samples_of(estimates) == 7.0
    assert fixed_samples_of(estimates[:2]) == 7.0


def test_node_without_samples_costs_nothing() -> None:
    assert divide(32, [32, 32], costs(1, 4), 100.0) == (32, 0)
    assert divide(32, [32, 32], costs(1, 1), 100.0) == (16, 16)
    assert divide(32, [32, 32], costs(1, 4)) == (26, 6)


def test_server_divides_by_the_fixed_part_and_remembers_it() -> None:
    desk = Desk(AgreementSettings(batch=30, outer=SGD), num_samples=300, quorum=2)
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        desk.server.benchmark(name, seconds, 30.0)
        desk.admit(name)
    shares = [(name, lease.num_samples) for name, leases in desk.leases.items() for lease in leases]
    assert shares == [("a", 30)]
    assert [cost.seconds(30) for cost in desk.server.costs] == [30.0, 60.0]
    again = ParameterServer.resume(desk.server.snapshot(), first_number=0)
    assert again.snapshot().state.fixed_samples == {"a": 30.0, "b": 30.0}
    whole = Desk(AgreementSettings(batch=30, outer=SGD, staleness=None), quorum=2)
    whole.server.benchmark("a", 1.0, 30.0)
    whole.admit("a")
    assert whole.server.costs[0].fixed_seconds == 0.0
