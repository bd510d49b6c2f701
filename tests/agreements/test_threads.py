"""Every element is worked on once, whatever the number of threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.agreements.threads import BLOCK_BYTES, ThreadPool


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 50), st.integers(0, 12 * BLOCK_BYTES // 4))
def test_every_element_is_visited_once_in_cache_sized_blocks(threads: int, start: int, count: int) -> None:
    seen = np.zeros(start + count, np.int32)

    def task(thread: int, a: int, b: int) -> None:
        assert 0 <= thread < threads
        assert 0 < b - a <= BLOCK_BYTES // 4
        seen[a:b] += 1

    with ThreadPool(threads) as cores:
        cores.each(start, start + count, 4, task)
    assert (seen[start:] == 1).all()
    assert (seen[:start] == 0).all()


def test_only_long_arrays_use_several_threads() -> None:
    found: dict[int, set[str]] = {}

    def task(thread: int, a: int, b: int) -> None:
        found.setdefault(thread, set()).add(threading.current_thread().name)

    with ThreadPool(3) as cores:
        cores.each(0, 20 * BLOCK_BYTES, 1, task)
        assert set(found) == {0, 1, 2}
        assert len(set.union(*found.values())) > 1
        found.clear()
        cores.each(0, BLOCK_BYTES, 1, task)
    assert found == {0: {threading.current_thread().name}}


@pytest.mark.parametrize("bad", [0, 15])
def test_exception_in_a_block_is_raised(bad: int) -> None:
    def task(_: int, a: int, b: int) -> None:
        if a == bad * BLOCK_BYTES:
            raise ValueError("bad block")

    with ThreadPool(2) as cores, pytest.raises(ValueError, match="bad block"):
        cores.each(0, 16 * BLOCK_BYTES, 1, task)


def test_scratch_is_per_thread_and_allocated_once() -> None:
    cores, like = ThreadPool(1), np.zeros(10, np.float32)
    first, second, other = cores.scratch(0, 0, like), cores.scratch(0, 1, like), cores.scratch(1, 0, like)
    first[:], second[:], other[:] = 1, 2, 3
    assert first.base is cores.scratch(0, 0, like).base
    assert (first.sum(), second.sum(), other.sum()) == (10, 20, 30)
    assert cores.scratch(0, 0, np.zeros(7)).dtype == np.float64
