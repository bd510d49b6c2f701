"""Speeds are believed as benchmarked, then as measured: a measurement counts a quarter, an absurd one is held back."""

from __future__ import annotations

from math import inf, nan

import pytest

from evener.agreements.worker_record import MAX_RISE, MAX_SLOWDOWN, SpeedEstimate
from evener.agreements.worker_record import seconds_of as of_all


def seconds_of(*estimates: SpeedEstimate) -> list[float]:
    return of_all(estimates)


def test_unknown_node_is_assumed_to_have_the_median_speed() -> None:
    assert seconds_of(SpeedEstimate(), *map(SpeedEstimate, (1.0, 2.0, 9.0))) == [2.0, 1.0, 2.0, 9.0]
    assert seconds_of(SpeedEstimate(), SpeedEstimate()) == [1.0, 1.0]


def test_benchmark_counts_until_a_measurement() -> None:
    speed = SpeedEstimate()
    speed.benchmark(0.5)
    assert seconds_of(speed) == [0.5]
    assert speed.observe(10, 10.0) == 10.0
    assert seconds_of(speed) == [0.625]
    for _ in range(40):
        speed.observe(10, 10.0)
    speed.benchmark(7.0)
    assert seconds_of(speed) == [pytest.approx(1.0, abs=1e-4)]


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_invalid_durations_are_ignored(seconds: float) -> None:
    speed, known = SpeedEstimate(), SpeedEstimate(1.0)
    speed.benchmark(seconds)
    assert speed.observe(10, seconds) == 0.0
    assert speed.observe(0, 1.0) == 0.0
    assert speed.seconds is None
    assert known.observe(10, seconds) == 10.0
    assert seconds_of(known) == [1.0]


def test_late_node_counts_as_half_as_fast_each_time() -> None:
    speed, other = SpeedEstimate(1.0), SpeedEstimate(1.0)
    speed.was_late()
    speed.was_late()
    assert seconds_of(speed, other) == [4.0, 1.0]


def test_new_measurement_has_a_weight_of_a_quarter() -> None:
    speed = SpeedEstimate(1.0)
    assert speed.observe(10, 20.0) == 20.0
    assert seconds_of(speed) == [1.0 + 0.25 * (2.0 - 1.0)]


def test_single_long_pause_has_a_bounded_effect() -> None:
    speed = SpeedEstimate(1.0)
    assert speed.observe(10, 1000.0) == MAX_SLOWDOWN * 10
    assert seconds_of(speed) == [1.75]


def test_claimed_speed_rises_gradually_to_the_measured_one() -> None:
    claimed, measured, slower = SpeedEstimate(), SpeedEstimate(1e-6), SpeedEstimate()
    claimed.benchmark(0.1)
    slower.benchmark(3.0)
    for one in (claimed, measured, slower):
        one.bound_claim(1.0)
    assert seconds_of(claimed, measured, slower) == [1.0, 1e-6, 3.0]
    risen = []
    for _ in range(5):
        claimed.observe(10, 1.0)
        claimed.bound_claim(1.0)  # somebody else has come
        risen += seconds_of(claimed)
    assert risen == [1.0 / MAX_RISE, 1.0 / MAX_RISE**2, 1.0 / MAX_RISE**3, 0.1, 0.1]


def test_slow_first_lease_does_not_stop_the_rise() -> None:
    speed = SpeedEstimate()
    speed.benchmark(0.1)
    speed.bound_claim(1.0)
    speed.observe(10, 20.0)  # it had to warm up
    assert seconds_of(speed) == [1.25]
    for _ in range(4):
        speed.observe(10, 1.0)
    assert seconds_of(speed) == [0.1]
    for _ in range(2):
        speed.observe(10, 0.5)
        assert seconds_of(speed) == [0.1]
    speed.observe(10, 0.5)
    assert seconds_of(speed) == [pytest.approx(0.1 - 0.25 * 0.05)]


def test_single_slow_steps_change_nothing_and_a_slow_down_is_found() -> None:
    speed = SpeedEstimate(1.0)
    for number in range(30):
        speed.observe(10, 200.0 if number % 4 == 3 else 10.0)
        assert seconds_of(speed) == [1.0]
    for _ in range(8):
        speed.observe(10, 30.0)
    assert seconds_of(speed) > [2.5]
