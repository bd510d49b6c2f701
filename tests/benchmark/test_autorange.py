"""The climb to problems that fill a device, on simulated devices with a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.benchmark.autorange import Autorange, autorange

FLOPS = [2.0 * n**3 for n in (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)]


class Device:
    """A device with a rate, an overhead a call, and other processes that now and then hold a call up."""

    def __init__(self, rate: float, overhead: float = 0.0, busy: float = 0.0, seed: int = 0) -> None:
        self.rate, self.overhead, self.busy = rate, overhead, busy
        self.random = random.Random(seed)
        self.time = 0.0
        self.calls: list[int] = []

    def seconds_of(self, rung: int) -> float:
        seconds = self.overhead + FLOPS[rung] / self.rate
        if self.random.random() < self.busy:
            seconds += self.random.uniform(0, 0.030)
        self.calls.append(rung)
        self.time += seconds
        return seconds

    def measure(self, budget: float, seconds_of: Callable[[int], float] | None = None) -> float | None:
        ladder = Autorange(FLOPS, seconds_of or self.seconds_of)
        autorange([ladder], budget, lambda: self.time)
        return ladder.rate


@given(rate=st.floats(1e9, 1e12), seed=st.integers(0, 99))
def test_two_measures_of_a_busy_device_agree_within_a_tenth_and_never_exceed_its_rate(rate: float, seed: int) -> None:
    rates = [Device(rate, overhead=2e-5, busy=0.3, seed=run).measure(1.0) or 0.0 for run in (seed, seed + 1000)]
    assert max(rates) <= 1.1 * min(rates)
    assert max(rates) <= rate * (1 + 1e-9)


def test_a_large_overhead_a_call_is_climbed_out_of() -> None:
    rate = Device(rate=1e12, overhead=1e-4).measure(0.5)
    assert rate is not None
    assert rate > 0.95e12


def test_slow_calls_on_the_way_up_do_not_end_the_climb_for_good() -> None:
    device = Device(rate=1e12, overhead=1e-4)

    def seconds_of(rung: int) -> float:
        return device.seconds_of(rung) + (0.2 if len(device.calls) <= 2 else 0)

    rate = device.measure(0.5, seconds_of)
    assert rate is not None
    assert rate > 0.95e12


def test_a_slow_device_is_measured_with_small_problems_only() -> None:
    device = Device(rate=1e9)
    assert device.measure(0.2) == pytest.approx(1e9)
    assert max(FLOPS[rung] for rung in device.calls) / 1e9 < 0.05
    assert device.time < 0.4


def test_the_ladder_ends_below_a_problem_that_does_not_fit() -> None:
    device = Device(rate=1e13)

    def seconds_of(rung: int) -> float:
        if rung > 5:
            raise RuntimeError("out of memory")
        return device.seconds_of(rung)

    assert device.measure(0.001, seconds_of) == pytest.approx(1e13)
    assert device.calls[-3:] == [3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError("not implemented for 'Half'\ntrace"), TypeError("no such dtype")])
def test_a_device_that_refuses_the_smallest_problem_has_no_rate_and_says_why(error: Exception) -> None:
    def seconds_of(rung: int) -> float:
        raise error

    ladder = Autorange(FLOPS, seconds_of)
    autorange([ladder], 0.001)
    assert ladder.rate is None
    assert ladder.refusal == str(error).partition("\n")[0]


def test_several_ladders_share_the_time_and_all_are_repeated() -> None:
    fast, slow = Device(rate=1e12), Device(rate=1e10)
    ladders = [Autorange(FLOPS, device.seconds_of) for device in (fast, slow)]
    autorange(ladders, 2.0, lambda: fast.time + slow.time)
    assert [ladder.rate for ladder in ladders] == [pytest.approx(1e12), pytest.approx(1e10)]
    assert 2.0 <= fast.time + slow.time < 2.2
    assert min(fast.calls.count(max(fast.calls)), slow.calls.count(max(slow.calls))) > 10
