"""A slowed rank idles in proportion to what it computed, and no longer; waiting for others is not computing."""

from __future__ import annotations

import time

import pytest
import torch

from evener.comm.step_timing import StepTimer
from support.told_clock import Clock


def step(clock: Clock, timer: StepTimer, seconds: float, samples: int = 1) -> float:
    """Seconds that a step of so much computing takes, idling included."""
    start = time.perf_counter()
    timer.pace.expect(samples)
    timer.resume("fb")
    clock.compute(seconds)
    timer.pause(before_update=True)
    timer.resume("wu")
    timer.close_step(samples)
    return time.perf_counter() - start


@pytest.mark.parametrize("speed", [0.5, 0.25])
def test_slowed_rank_takes_proportionally_longer(speed: float, clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), speed)
    took = sum(step(clock, timer, 0.02) for _ in range(8))
    assert took == pytest.approx(8 * 0.02 / speed, rel=0.15)


def test_full_speed_rank_does_not_idle(clock: Clock) -> None:
    start = time.thread_time()
    timer = StepTimer(torch.device("cpu"))
    timer.resume("fb")
    clock.compute(0.02)
    [timing] = timer.close_step(7)
    assert timing.samples == 7
    assert timing.fb >= 0.02
    assert timing.io == timing.wu == 0
    assert time.thread_time() - start < 0.1


def test_time_of_other_processes_shortens_the_idling(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), 0.25)
    start = time.perf_counter()
    timer.resume("fb")
    clock.compute(0.02)
    clock.compute(0.0, others=0.03)
    timer.close_step(1)
    assert time.perf_counter() - start == pytest.approx(0.08, abs=0.02)


def test_waiting_for_others_is_not_computing(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.resume("fb")
    clock.compute(0.01)
    timer.pause()
    clock.compute(0.0, others=0.05)
    timer.resume("wu")
    clock.compute(0.01)
    [timing] = timer.close_step(1)
    assert 0.01 <= timing.fb < 0.04
    assert 0.01 <= timing.wu < 0.04


def test_step_of_a_slowed_rank_takes_reference_over_speed(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), 0.25)
    timer.pace.reference = lambda samples: 0.002 * samples
    for seconds in (0.025, 0.01, 0.03, 0.02):
        assert step(clock, timer, seconds, samples=10) == pytest.approx(0.02 / 0.25, rel=0.1)


def test_overlong_step_shortens_the_next_one(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), 0.5)
    timer.pace.reference = lambda samples: 0.002 * samples
    assert step(clock, timer, 0.06, samples=10) >= 0.06
    assert step(clock, timer, 0.005, samples=10) < 0.035  # it may take 0.04 s, less what the first took too long


def test_loading_is_slowed_in_addition_to_the_reference(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), 0.5)
    timer.pace.reference = lambda samples: 0.002 * samples
    for _ in range(2):
        start = time.perf_counter()
        timer.resume("io")
        clock.compute(0.03)
        timer.pause()
        assert time.perf_counter() - start == pytest.approx(0.06)
        assert step(clock, timer, 0.02, samples=10) == pytest.approx(0.04)


def test_slowed_update_does_not_delay_the_others(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"), 0.5)
    timer.pace.reference = lambda samples: 0.02 * samples
    for _ in range(3):  # the first learns what an update takes, the second makes up for it
        start = time.perf_counter()
        timer.pace.expect(1)
        timer.resume("fb")
        timer.pause(before_update=True)
        ready = time.perf_counter() - start
        timer.resume("wu")
        clock.compute(0.01)
        timer.close_step(1)
    assert ready == pytest.approx(0.02, abs=0.005)
    assert time.perf_counter() - start == pytest.approx(0.04, abs=0.005)


def test_discarded_time_belongs_to_no_step(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.resume("fb")
    clock.compute(0.02)
    timer.discard()
    timer.resume("fb")
    [timing] = timer.close_step(1)
    assert timing.seconds < 0.01
