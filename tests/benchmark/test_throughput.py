"""FLOP/s of this machine's CPU, and the climb to problems that fill a device, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from evener.benchmark import device as device_module
from evener.benchmark.device import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    Autorange,
    Problem,
    autorange,
    measure_throughputs,
)
from evener.records.profile import PRECISIONS, Throughput

CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


@pytest.mark.parametrize("problem", [*MATRIX_PRODUCTS[:5], *CONVOLUTIONS[:6]])
def test_problem_computes_the_flops_it_states(problem: Problem) -> None:
    call = problem.prepare(random)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == problem.flops


@pytest.mark.parametrize("problems", [MATRIX_PRODUCTS, CONVOLUTIONS])
def test_each_problem_is_larger_than_the_previous_by_at_most_four_times(problems: Sequence[Problem]) -> None:
    steps = [above.flops / below.flops for below, above in pairwise(problems)]
    assert min(steps) > 1.5
    assert max(steps) <= 4


def test_cpu_measurements_agree_and_are_plausible() -> None:
    for patience in (2, 1, 0):  # others may use the machine meanwhile
        first, second = (measure_throughputs(CPU, ("fp32",), 0.6)[0] for _ in range(2))
        agree = all(
            getattr(second, field) == pytest.approx(getattr(first, field), rel=0.3)
            for field in ("matmul_flops", "conv_flops")
        )
        assert agree or patience
        if agree:
            break
    assert first.reason == ""
    assert first.matmul_flops is not None
    assert 1e8 < first.matmul_flops < 1e13


def test_precision_emulated_by_the_cpu_is_measured_too() -> None:
    throughput = measure_throughputs(CPU, ("fp16",), 0.1)[0]
    assert throughput.matmul_flops is not None
    assert throughput.matmul_flops > 1e6


def test_unsupported_operator_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("\"conv2d\" not implemented for 'Half'\nsecond line")

    monkeypatch.setattr("torch.nn.functional.conv2d", refuse)
    throughputs = measure_throughputs(CPU, PRECISIONS, 0.05)
    assert tuple(t.precision for t in throughputs) == PRECISIONS
    for throughput in throughputs:
        assert throughput.conv_flops is None
        assert throughput.reason == "convolution: \"conv2d\" not implemented for 'Half'"
        assert throughput.matmul_flops is not None


def test_measuring_preserves_the_random_state() -> None:
    before = torch.get_rng_state()
    measure_throughputs(CPU, ("bf16",), 0.02)[0]
    assert torch.equal(before, torch.get_rng_state())


def test_throughput_of_concurrent_threads_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Throughput(precision="fp16", matmul_flops=2e9, conv_flops=None, reason="convolution: no")
    monkeypatch.setattr(device_module, "_climb", lambda device, precisions, budget: [part])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert measure_throughputs(CPU, ("fp16",), 1.0)[0] == Throughput(
        precision="fp16", matmul_flops=6e9, conv_flops=None, reason="convolution: no"
    )


FLOPS = [2.0 * n**3 for n in (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)]


class Device:
    """A device with a rate, an overhead a call, and other processes that now and then hold a call up."""

    def __init__(self, rate: float, overhead: float = 0.0, busy: float = 0.0, seed: int = 0) -> None:
        self.rate, self.overhead, self.busy = rate, overhead, busy
        self.random = Random(seed)
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
def test_busy_device_measurements_agree_and_never_exceed_its_rate(rate: float, seed: int) -> None:
    rates = [Device(rate, overhead=2e-5, busy=0.3, seed=run).measure(1.0) or 0.0 for run in (seed, seed + 1000)]
    assert max(rates) <= 1.1 * min(rates)
    assert max(rates) <= rate * (1 + 1e-9)


def test_large_call_overhead_is_overcome_by_larger_problems() -> None:
    rate = Device(rate=1e12, overhead=1e-4).measure(0.5)
    assert rate is not None
    assert rate > 0.95e12


def test_early_slow_calls_do_not_end_the_search() -> None:
    device = Device(rate=1e12, overhead=1e-4)

    def seconds_of(rung: int) -> float:
        return device.seconds_of(rung) + (0.2 if len(device.calls) <= 2 else 0)

    rate = device.measure(0.5, seconds_of)
    assert rate is not None
    assert rate > 0.95e12


def test_slow_device_is_measured_with_small_problems_only() -> None:
    device = Device(rate=1e9)
    assert device.measure(0.2) == pytest.approx(1e9)
    assert max(FLOPS[rung] for rung in device.calls) / 1e9 < 0.05
    assert device.time < 0.4


def test_search_ends_below_a_problem_that_does_not_fit() -> None:
    device = Device(rate=1e13)

    def seconds_of(rung: int) -> float:
        if rung > 5:
            raise RuntimeError("out of memory")
        return device.seconds_of(rung)

    assert device.measure(0.001, seconds_of) == pytest.approx(1e13)
    assert device.calls[-3:] == [3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError("not implemented for 'Half'\ntrace"), TypeError("no such dtype")])
def test_device_that_refuses_the_smallest_problem_reports_no_rate(error: Exception) -> None:
    def seconds_of(rung: int) -> float:
        raise error

    ladder = Autorange(FLOPS, seconds_of)
    autorange([ladder], 0.001)
    assert ladder.rate is None
    assert ladder.refusal == str(error).partition("\n")[0]


def test_concurrent_searches_share_the_time_and_all_repeat() -> None:
    fast, slow = Device(rate=1e12), Device(rate=1e10)
    ladders = [Autorange(FLOPS, device.seconds_of) for device in (fast, slow)]
    autorange(ladders, 2.0, lambda: fast.time + slow.time)
    assert [ladder.rate for ladder in ladders] == [pytest.approx(1e12), pytest.approx(1e10)]
    assert 2.0 <= fast.time + slow.time < 2.2
    assert min(fast.calls.count(max(fast.calls)), slow.calls.count(max(slow.calls))) > 10
