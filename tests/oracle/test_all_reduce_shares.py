"""Shares of sums: no line carries longer than it must, and equal lines keep a ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.all_reduce_shares import MAX_RATIO, bytes_of_uneven_all_reduce, shares_of_sums
from evener.records.errors import InvalidValue
from support.refusals import refused

RATES = st.lists(st.floats(1e5, 1e9), min_size=3, max_size=9)


def seconds(rates: list[float], shares: tuple[float, ...]) -> float:
    """Seconds per byte of the tensor, until the last line has carried its part."""
    return max(bytes_of_uneven_all_reduce(1, len(rates), f) / rate for f, rate in zip(shares, rates, strict=True))


def ring_seconds(rates: list[float]) -> float:
    return 2 * (len(rates) - 1) / len(rates) / min(rates)


@pytest.mark.parametrize(
    ("rates", "ratio"), [([1000, 1000, 1000, 100], 2 / 3), ([1000] * 7 + [100], 4 / 7), ([1000, 1000, 100], 3 / 4)]
)
def test_slow_line_carries_every_byte_once_each_way(rates: list[float], ratio: float) -> None:
    shares = shares_of_sums(rates)
    assert shares[-1] == 0
    assert seconds(rates, shares) == pytest.approx(ratio * ring_seconds(rates))


@given(RATES)
def test_shares_beat_a_ring_and_cannot_be_improved(rates: list[float]) -> None:
    shares = shares_of_sums(rates)
    if not shares:
        return
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    best = seconds(rates, shares)
    assert best <= (MAX_RATIO + 1e-6) * ring_seconds(rates)
    slowest_must = 1 / min(rates)
    room = sum(max(0.0, (best * (1 - 1e-6) * rate - 1) / (len(rates) - 2)) for rate in rates)
    assert best == pytest.approx(slowest_must) or room < 1 + 1e-9  # in less time the lines could not carry all sums


@pytest.mark.parametrize("rates", [[1.0], [5.0, 1.0], [7.0] * 4, [7.0, 6.5, 7.0, 7.1], []])
def test_ring_stays_where_it_is_as_fast(rates: list[float]) -> None:
    assert shares_of_sums(rates) == ()


@pytest.mark.parametrize("rates", [[1e9, 1e9, 1e-300], [1e308, 1e308, 1.0], [5e-324, 1e9, 1e9]])
def test_line_that_carries_nothing_owns_nothing(rates: list[float]) -> None:
    shares = shares_of_sums(rates)
    assert sum(shares) == pytest.approx(1)
    assert shares[rates.index(min(rates))] == 0


def test_line_without_a_rate_is_refused() -> None:
    with refused(InvalidValue):
        shares_of_sums([1.0, 0.0, 2.0])
