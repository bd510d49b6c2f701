"""Tables of whole numbers near proportional ones: rows exact, every cell and column the floor or the ceiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.data.shares import round_table
from evener.records.errors import InvalidValue
from support.refusals import refused

COUNTS = st.lists(st.one_of(st.integers(0, 12), st.sampled_from([15, 20, 30, 60, 1000])), max_size=12)
WHOLE = st.lists(st.one_of(st.just(0), st.integers(1, 6), st.sampled_from([10, 15, 30, 10**9])), min_size=1, max_size=8)
DECIMAL = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=8)


def assert_rounded(counts: Sequence[int], weights: Sequence[float]) -> None:
    table = round_table(counts, weights)
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    assert table.shape == (len(counts), len(weights))
    assert table.sum(axis=1).tolist() == list(counts)
    for j, share in enumerate(shares):
        for k, count in enumerate(counts):
            assert table[k, j] in (math.floor(count * share), math.ceil(count * share))
        total = sum(counts) * share
        assert table[:, j].sum() in (math.floor(total), math.ceil(total))


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [
        ([10, 20], [1, 1], [[5, 5], [10, 10]]),
        ([10, 20], [3, 2], [[6, 4], [12, 8]]),
        ([7], [1], [[7]]),
        ([4, 6], [0, 0.5, 0.5], [[0, 2, 2], [0, 3, 3]]),
        ([10, 30], [0.1, 0.2, 0.7], [[1, 2, 7], [3, 6, 21]]),
        ([2, 20], [0.9, 0.2, 0.1], [[2, 0, 0], [15, 3, 2]]),  # 15 exactly in decimals; in binary a little less
        ([1, 1, 1, 1], [1, 1], [[1, 0], [0, 1], [1, 0], [0, 1]]),
        ([3, 3], [1, 1], [[2, 1], [1, 2]]),
        ([], [1, 2], []),
        ([0, 2], [1, 1], [[0, 0], [1, 1]]),
    ],
)
def test_small_tables_are_rounded_to_literal_values(
    counts: list[int], weights: list[float], expected: list[list[int]]
) -> None:
    assert round_table(counts, weights).tolist() == expected


@given(counts=COUNTS, weights=WHOLE.filter(any))
def test_cells_and_totals_are_the_floor_or_the_ceiling_for_whole_weights(counts: list[int], weights: list[int]) -> None:
    assert_rounded(counts, weights)


@given(counts=COUNTS, weights=DECIMAL.filter(any))
def test_cells_and_totals_are_the_floor_or_the_ceiling_for_any_weights(counts: list[int], weights: list[float]) -> None:
    assert_rounded(counts, weights)


@pytest.mark.parametrize(
    ("counts", "weights"),
    [
        ([60, 10, 10, 2, 6], [3, 2, 2, 1, 15, 3, 15, 3, 15, 1, 1, 30]),  # one column ends above its bounds
        ([10, 4, 10, 10, 20, 1, 12, 30, 2], [5, 20, 2, 2, 10, 15, 1]),  # one below
    ],
)
def test_columns_outside_their_bounds_are_repaired(
    counts: list[int], weights: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_rounded(counts, weights)
    monkeypatch.setattr("evener.data.shares._mend", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_rounded(counts, weights)


def test_table_of_a_thousand_classes_on_64_nodes_is_rounded() -> None:
    generator = np.random.default_rng(0)
    assert_rounded(generator.integers(1, 600, 1000).tolist(), generator.random(64).tolist())


@pytest.mark.parametrize("weights", [[], [0, 0.0], [1, -1], [1, math.inf], [math.nan]])
def test_weights_without_a_positive_finite_sum_are_refused(weights: list[float]) -> None:
    with refused(InvalidValue):
        round_table([1], weights)
