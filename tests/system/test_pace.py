"""A slowed node idles in proportion to its processor time, and no longer than that."""

from __future__ import annotations

import pytest

from evener.records.errors import InvalidValue
from evener.system.pace import Pace
from support.refusals import refused
from support.told_clock import Clock


def test_a_node_of_a_quarter_of_the_speed_takes_four_times_as_long(clock: Clock) -> None:
    pace = Pace(0.25)
    with pace.computing():
        clock.compute(1.0)
    assert clock.wall == pytest.approx(4.0)


def test_what_another_process_took_is_taken_out_of_the_idling(clock: Clock) -> None:
    pace = Pace(0.5)
    with pace.computing():
        clock.compute(1.0, others=0.75)
    assert clock.slept == [pytest.approx(0.25)]
    assert clock.wall == pytest.approx(2.0)


def test_who_was_held_up_longer_than_its_speed_demands_has_little_credit(clock: Clock) -> None:
    pace = Pace(0.5)
    with pace.computing():
        clock.compute(1.0, others=60.0)
    assert clock.slept == []
    with pace.computing():
        clock.compute(1.0)
    assert clock.slept == [pytest.approx(0.998)]


def test_short_idling_is_put_together(clock: Clock) -> None:
    pace = Pace(0.5)
    for _ in range(4):
        with pace.computing():
            clock.compute(0.0002)
    assert clock.slept == [pytest.approx(0.0006)]


def test_on_a_gpu_the_wall_clock_counts_once_the_work_is_done(clock: Clock) -> None:
    pace = Pace(0.5, synchronise=lambda: clock.compute(0.0, others=1.0))
    with pace.computing():
        clock.compute(0.5)
    assert clock.wall == pytest.approx(3.0)


def test_a_node_of_full_speed_never_idles(clock: Clock) -> None:
    with Pace().computing():
        clock.compute(1.0, others=2.0)
    assert clock.slept == []


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.5])
def test_a_speed_is_a_fraction(speed: float) -> None:
    with refused(InvalidValue):
        Pace(speed)
