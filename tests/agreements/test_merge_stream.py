"""Our merging: the weighted mean, the same bits whatever arrives when, and nothing that is not finite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.agreements.layout import Flat
from evener.agreements.threads import BLOCK_BYTES, ThreadPool
from evener.agreements.update import Merging, is_finite
from support.merge_cases import layout, merged, sources


@pytest.mark.parametrize("weights", [[5.0], [1.0, 1.0, 1.0], [32.0, 7.0, 1.0], [3.0, 3.0, 0.5, 3.0]])
def test_merge_is_the_weighted_mean_and_sums_counters(weights: list[float]) -> None:
    flats = sources(len(weights), layout(1000))
    out = merged(flats, weights)
    for k, array in enumerate(out.floats):
        expected = np.average([flat.floats[k].astype(float) for flat in flats], axis=0, weights=weights)
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-14 if array.dtype == np.float64 else 4e-7)
    np.testing.assert_array_equal(out.counters, sum(flat.counters for flat in flats))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.floats(0, 1), max_size=6),
    st.integers(1, 3),
    st.integers(1, 5 * BLOCK_BYTES // 4),
)
def test_merged_bits_do_not_depend_on_arrival_order_or_threads(
    weights: list[float], arrivals: list[float], threads: int, size: int
) -> None:
    of = layout(size, doubles=size // 3)
    flats = sources(len(weights), of)
    expected = merged(flats, weights)
    out, arriving = Flat(of), [Flat(of) for _ in flats]
    with ThreadPool(threads) as cores:
        merging = Merging(out, arriving, weights, cores)
        for part in sorted(arrivals):
            here = int(part * of.num_bytes)
            for source, flat in zip(arriving, flats, strict=True):
                source.memory[:here] = flat.memory[:here]
            merging.advance(here)
        for source, flat in zip(arriving, flats, strict=True):
            source.copy_from(flat)
        assert merging.finish() == ()
    assert out.memory.tobytes() == expected.memory.tobytes()


def test_arrived_data_are_merged_once_in_blocks() -> None:
    block = BLOCK_BYTES // 4
    of = layout(3 * block)
    flats = sources(2, of)
    out = Flat(of)
    merging, w = Merging(out, flats, [1, 1], ThreadPool(1)), out.views()["w"]
    merging.advance(of.offsets["w"] + 4 * (block - 1))
    assert not w.any(), "too little to be worth it"
    merging.advance(of.offsets["w"] + 4 * (block + 10) + 3)
    assert w[: block + 10].any()
    assert not w[block + 10 :].any()
    before = w[: block + 10].copy()
    flats[0].views()["w"][: block + 10] = 77
    merging.finish()
    np.testing.assert_array_equal(w[: block + 10], before)
    assert w[block + 10 :].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["d", "w", "mean"])
def test_sources_with_non_finite_values_are_named(value: float, name: str) -> None:
    flats = sources(4, layout(50))
    flats[1].views()[name][-1] = flats[3].views()[name][0] = value
    assert Merging(Flat(flats[0].layout), flats, [1, 2, 3, 4], ThreadPool(1)).finish() == (1, 3)
    assert [is_finite(flat, ThreadPool(1)) for flat in flats] == [True, False, True, False]


def test_opposite_infinities_are_both_detected() -> None:
    flats = sources(2, layout(50))
    flats[0].views()["w"][7], flats[1].views()["w"][7] = np.inf, -np.inf
    assert Merging(Flat(flats[0].layout), flats, [1, 1], ThreadPool(1)).finish() == (0, 1)


def test_overflowing_sum_drops_all_sources() -> None:
    flats = sources(2, layout(50))
    for flat in flats:
        flat.views()["w"][3] = np.finfo(np.float32).max
    assert Merging(Flat(flats[0].layout), flats, [1, 1], ThreadPool(1)).finish() == (0, 1)
