"""FLOP/s of this machine's CPU, and what is said of operators that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from evener.benchmark import throughput as throughput_module
from evener.benchmark.throughput import CONVOLUTIONS, MATRIX_PRODUCTS, Problem, measure_throughputs
from evener.errors import InvalidValue
from evener.profile import PRECISIONS, Throughput

CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


@pytest.mark.parametrize("problem", [*MATRIX_PRODUCTS[:5], *CONVOLUTIONS[:6]])
def test_a_problem_does_as_many_flops_as_it_says(problem: Problem) -> None:
    call = problem.prepare(random)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == problem.flops


@pytest.mark.parametrize("problems", [MATRIX_PRODUCTS, CONVOLUTIONS])
def test_every_rung_is_larger_than_the_one_below_but_by_no_more_than_four_times(problems: Sequence[Problem]) -> None:
    steps = [above.flops / below.flops for below, above in pairwise(problems)]
    assert min(steps) > 1.5
    assert max(steps) <= 4


def test_two_measures_agree_and_are_those_of_a_processor() -> None:
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


def test_a_precision_that_the_cpu_emulates_is_measured_too() -> None:
    throughput = measure_throughputs(CPU, ("fp16",), 0.1)[0]
    assert throughput.matmul_flops is not None
    assert throughput.matmul_flops > 1e6


def test_an_operator_that_the_device_refuses_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("\"conv2d\" not implemented for 'Half'\nsecond line")

    monkeypatch.setattr("torch.nn.functional.conv2d", refuse)
    throughputs = measure_throughputs(CPU, PRECISIONS, 0.05)
    assert tuple(t.precision for t in throughputs) == PRECISIONS
    for throughput in throughputs:
        assert throughput.conv_flops is None
        assert throughput.reason == "convolution: \"conv2d\" not implemented for 'Half'"
        assert throughput.matmul_flops is not None


def test_the_random_numbers_of_the_program_are_left_alone() -> None:
    before = torch.get_rng_state()
    measure_throughputs(CPU, ("bf16",), 0.02)[0]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("precision", "budget"), [("fp8", 1.0), ("fp32", 0.0)])
def test_a_wrong_argument_is_named(precision: str, budget: float) -> None:
    with pytest.raises(InvalidValue, match=r"precision must be one of fp64|budget_seconds must be positive"):
        measure_throughputs(CPU, (precision,), budget)[0]  # type: ignore[arg-type]


def test_what_threads_do_at_the_same_time_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Throughput(precision="fp16", matmul_flops=2e9, conv_flops=None, reason="convolution: no")
    monkeypatch.setattr(throughput_module, "_climb", lambda device, precisions, budget: [part])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert measure_throughputs(CPU, ("fp16",), 1.0)[0] == Throughput(
        precision="fp16", matmul_flops=6e9, conv_flops=None, reason="convolution: no"
    )
