"""How far values are apart: complex ones in both parts, statistics by the size of what they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.training.differences import as_real, largest, off_by, statistic_size
from evener.training.narrowing import Narrowing


def test_complex_values_differ_in_their_imaginary_parts_too() -> None:
    value, expected = torch.tensor([1 + 2j]), torch.tensor([1 + 1j])
    assert off_by(as_real(value), as_real(expected), largest(as_real(expected))) == 1.0
    assert as_real(expected.conj()).tolist() == [[1.0, -1.0]]


def test_running_mean_is_compared_relative_to_the_values_it_averages() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    state["0.running_var"].copy_(torch.tensor([4.0, 9.0]))
    assert statistic_size("0.running_mean", state) == 3.0
    assert statistic_size("0.running_var", state) == 0.0
    assert statistic_size("running_mean", {"running_mean": torch.zeros(1)}) == 0.0


def test_cast_from_double_precision_sets_the_tolerance_of_its_target() -> None:
    def tolerance(dtype: torch.dtype, source: torch.dtype = torch.float64) -> float:
        with Narrowing() as narrowing:
            torch.ones(2, dtype=source).to(dtype)
        return float(narrowing.tolerance)

    assert tolerance(torch.float64, torch.float32) == tolerance(torch.int64) == 0.0
    assert 0 < tolerance(torch.float32) < tolerance(torch.bfloat16) <= 0.5
    into = torch.zeros(2)
    with Narrowing() as narrowing:
        into[:] = torch.ones(2, dtype=torch.float64)
    assert narrowing.tolerance == tolerance(torch.float32)


def test_sum_into_a_narrower_tensor_is_noted_and_allocation_is_not() -> None:
    value = torch.ones((), dtype=torch.float64)
    with Narrowing() as narrowing:
        torch.zeros_like(value, dtype=torch.float32)
    assert narrowing.tolerance == 0.0
    with Narrowing() as narrowing:
        total = torch.zeros(())
        total += value
    assert 0 < narrowing.tolerance < 1e-4


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "expected", "off"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, -INF], [1.0, INF], INF),
        ([2.0, NAN], [1.0, NAN], 0.5),
        ([1.0], [1.0, 2.0], INF),
    ],
)
def test_nan_and_number_are_infinitely_far_apart(value: list[float], expected: list[float], off: float) -> None:
    assert off_by(torch.tensor(value), torch.tensor(expected), 2.0) == off
