"""A slowed node idles in proportion to its processor time, and no longer than that."""

from __future__ import annotations

import pytest

from evener.records.errors import InvalidValue
from evener.system.pace import Pace
from support.refusals import refused
from support.told_clock import Clock


def test_quarter_speed_node_takes_four_times_as_long(clock: Clock) -> None:
    pace = Pace(0.25)
    with pace.computing():
        clock.compute(1.0)
    assert clock.wall == pytest.approx(4.0)


def test_time_of_other_processes_shortens_the_idling(clock: Clock) -> None:
    pace = Pace(0.5)
    with pace.computing():
        clock.compute(1.0, others=0.75)
    assert clock.slept == [pytest.approx(0.25)]
    assert clock.wall == pytest.approx(2.0)


def test_long_delay_gives_little_credit(clock: Clock) -> None:
    pace = Pace(0.5)
    with pace.computing():
        clock.compute(1.0, others=60.0)
    assert clock.slept == []
    with pace.computing():
        clock.compute(1.0)
    assert clock.slept == [pytest.approx(0.998)]


def test_short_idle_times_are_accumulated(clock: Clock) -> None:
    pace = Pace(0.5)
    for _ in range(4):
        with pace.computing():
            clock.compute(0.0002)
    assert clock.slept == [pytest.approx(0.0006)]


def test_gpu_work_counts_by_wall_clock_after_synchronization(clock: Clock) -> None:
    pace = Pace(0.5, synchronise=lambda: clock.compute(0.0, others=1.0))
    with pace.computing():
        clock.compute(0.5)
    assert clock.wall == pytest.approx(3.0)


def test_full_speed_node_never_idles(clock: Clock) -> None:
    with Pace().computing():
        clock.compute(1.0, others=2.0)
    assert clock.slept == []


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.5])
def test_speed_must_be_a_fraction(speed: float) -> None:
    with refused(InvalidValue):
        Pace(speed)
