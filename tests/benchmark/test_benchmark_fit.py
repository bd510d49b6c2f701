"""The straight line through measured batches."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.benchmark.fit import affine
from evener.profile import BatchTiming, TaskTiming

SIZES = st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True).map(sorted)


def timing(points: list[tuple[int, float]], update: float = 0.0) -> TaskTiming:
    batches = tuple(BatchTiming(samples=n, forward_seconds=t / 3, backward_seconds=t * 2 / 3) for n, t in points)
    return TaskTiming(task="t", precision="fp32", batches=batches, update_seconds=update)


@given(SIZES, st.floats(0, 0.1), st.floats(1e-6, 0.1), st.floats(0, 1))
def test_an_exact_line_is_recovered(sizes: list[int], fixed: float, sample: float, update: float) -> None:
    found = affine(timing([(n, fixed + sample * n) for n in sizes], update))
    scale = fixed + sample * sizes[-1]
    assert found[0] == pytest.approx(fixed + update, abs=1e-7 * scale)
    assert found[1] == pytest.approx(sample, abs=1e-7 * scale)


@given(SIZES, st.data())
def test_neither_part_is_negative_and_no_other_allowed_line_is_better(sizes: list[int], data: st.DataObject) -> None:
    points = [(n, data.draw(st.floats(1e-4, 1.0))) for n in sizes]
    fixed, sample = affine(timing(points))
    assert fixed >= 0
    assert sample >= 0

    def error(a: float, b: float) -> float:
        return sum(((a + b * n) / t - 1) ** 2 for n, t in points)

    slowest = max(t for _, t in points)
    steps = [(i / 20) ** 2 for i in range(21)]
    rivals = product((slowest * s for s in steps), (slowest / sizes[0] * s for s in steps))
    assert error(fixed, sample) <= min(error(a, b) for a, b in rivals) + 1e-9


def test_one_batch_gives_a_line_through_zero() -> None:
    assert list(affine(timing([(8, 0.4)], update=0.1))) == pytest.approx([0.1, 0.05])


def test_small_batches_count_like_large_ones() -> None:
    fixed, _ = affine(timing([(1, 0.011), (10, 0.020), (1000, 1.2)]))
    assert fixed == pytest.approx(0.01, rel=0.1)


def test_batches_too_short_for_the_clock_are_no_error() -> None:
    assert list(affine(timing([(1, 0.0), (2, 0.0)]))) == pytest.approx([0, 0], abs=1e-8)
