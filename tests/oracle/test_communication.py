"""What collectives cost, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import InvalidValue
from evener.oracle.communication import (
    Channel,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    broadcast_seconds,
    doubling_all_reduce_seconds,
    halving_all_reduce_seconds,
    reduce_scatter_seconds,
)

A, B = 0.5, 0.001


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (all_reduce_seconds(1000, 4, A, B), 6 * (0.5 + 0.25)),
        (doubling_all_reduce_seconds(1000, 4, A, B), 2 * (0.5 + 1.0)),
        (doubling_all_reduce_seconds(1000, 5, A, B), 3 * (0.5 + 1.0)),
        (halving_all_reduce_seconds(1000, 4, A, B), 4 * 0.5 + 1.5),
        (all_gather_seconds([250] * 4, A, B), 3 * (0.5 + 0.25)),
        (all_gather_seconds([700, 200, 100], A, B), 2 * (0.5 + 0.7)),
        (reduce_scatter_seconds([700, 200, 100], A, B), 2 * (0.5 + 0.7)),
        (all_to_all_seconds([[0, 100], [300, 0]], A, B), 0.5 + 0.3),
        (all_to_all_seconds([[9, 100, 100], [50, 9, 50], [0, 0, 9]], A, B), 2 * 0.5 + 0.2),
        (broadcast_seconds(1000, 4, A, B), 2 * (0.5 + 1.0)),
        (broadcast_seconds(100_000, 16, A, B), (4 + 15) * 0.5 + 2 * 15 / 16 * 100),
        (Channel(A, B).seconds(1000), 1.5),
    ],
)
def test_literal_costs(seconds: float, expected: float) -> None:
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("collective", [doubling_all_reduce_seconds, halving_all_reduce_seconds, broadcast_seconds])
def test_one_rank_tells_nobody_anything(collective: object) -> None:
    assert collective(1000, 1, A, B) == 0  # type: ignore[operator]
    assert all_gather_seconds([1000], A, B) == all_to_all_seconds([[1000]], A, B) == 0


@given(st.integers(2, 64), st.floats(1, 1e9))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, nbytes: float) -> None:
    parts = [nbytes / size] * size
    both = reduce_scatter_seconds(parts, A, B) + all_gather_seconds(parts, A, B)
    assert both == pytest.approx(all_reduce_seconds(nbytes, size, A, B))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=8))
def test_uneven_parts_never_travel_faster_than_equal_ones(parts: list[float]) -> None:
    equal = [sum(parts) / len(parts)] * len(parts)
    assert all_gather_seconds(parts, A, B) >= all_gather_seconds(equal, A, B) * (1 - 1e-12)


@pytest.mark.parametrize(("alpha", "beta", "field"), [(-1.0, 0.0, "alpha"), (0.0, -1.0, "beta")])
def test_a_channel_does_not_take_negative_time(alpha: float, beta: float, field: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be zero seconds"):
        Channel(alpha, beta)
