"""Scores are comparable: they follow the rates, whatever the reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.records.profile import Throughput

RATES = st.floats(1e6, 1e16)


def of(matmul: float | None, conv: float | None) -> float | None:
    return Throughput(precision="fp32", matmul_flops=matmul, conv_flops=conv, reason="r").score


def test_device_of_one_teraflop_has_a_thousand_points() -> None:
    assert of(1e12, 1e12) == pytest.approx(1000)
    assert of(4e12, 1e12) == pytest.approx(2000)


@given(RATES, RATES, st.floats(0.1, 10))
def test_score_is_proportional_to_both_rates(a: float, b: float, k: float) -> None:
    before, after = of(a, b), of(k * a, k * b)
    assert before is not None
    assert after == pytest.approx(k * before)


@pytest.mark.parametrize(("matmul", "conv"), [(None, 1e12), (1e12, None), (None, None)])
def test_device_lacking_one_rate_has_no_score(matmul: float | None, conv: float | None) -> None:
    assert of(matmul, conv) is None
