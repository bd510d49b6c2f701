"""A version of the weights stays as it is while anybody reads it, and memory is not taken without need."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from evener.agreements.layout import Flat
from evener.agreements.settings import Sgd
from evener.agreements.threads import ThreadPool
from evener.agreements.weights import Buffer, BufferPool, CommonWeights
from support.merge_cases import layout, sources


def common() -> tuple[CommonWeights, Flat]:
    of = layout(100)
    change = Flat(of)
    for array in change.parameters:
        array[:] = 1
    return CommonWeights(sources(1, of)[0], Sgd(learning_rate=1.0), ThreadPool(1)), change


def test_unread_weights_are_updated_in_place() -> None:
    weights, change = common()
    address, before = weights.weights.memory.ctypes.data, weights.weights.copy()
    weights.lend()
    weights.update(change)
    assert weights.version == 1
    assert weights.weights.memory.ctypes.data == address
    np.testing.assert_array_equal(weights.weights.parameters[0], before.parameters[0] - 1)


def test_lent_weights_do_not_change() -> None:
    weights, change = common()
    first = weights.lend()
    part, as_sent = first[8:24], bytes(first)
    weights.update(change)
    second = weights.lend()
    weights.update(change)
    assert bytes(first) == as_sent
    assert bytes(second) != as_sent
    del first
    weights.update(change)
    assert bytes(part) == as_sent[8:24], "a part of it counts as well"
    np.testing.assert_allclose(
        weights.weights.parameters[0], Flat(layout(100), np.frombuffer(as_sent, np.uint8)).parameters[0] - 3
    )


def test_two_buffers_suffice_for_one_slow_reader() -> None:
    weights, change = common()
    seen = set()
    for _ in range(10):
        reader = weights.lend()
        weights.update(change)
        seen.add(weights.weights.memory.ctypes.data)
        del reader
    assert len(seen) == 2


def test_buffer_is_lent_until_its_last_reader_has_gone() -> None:
    page = Buffer(Flat(layout(10)))
    assert not page.is_lent
    first, second = page.lend(), page.lend()
    array = np.frombuffer(second, np.uint8)
    del first, second
    assert page.is_lent
    del array
    assert not page.is_lent


def test_versions_that_all_have_received_are_freed() -> None:
    weights, change = common()
    answers = []
    for _ in range(20):
        answers.append(weights.lend())
        weights.update(change)
    assert len(weights._pool._buffers) == 20
    answers.clear()
    for _ in range(2):
        answers[:] = [weights.lend()]
        weights.update(change)
    assert len(weights._pool._buffers) <= 3


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_memory_of_versions_is_reused_with_several_readers(readers: int) -> None:
    weights, change = common()
    seen, lent = set(), deque[memoryview](maxlen=readers)
    for _ in range(100):
        lent.append(weights.lend())
        weights.update(change)
        seen.add(weights.weights.memory.ctypes.data)
    assert len(seen) <= readers + 2


def test_pool_never_gives_out_a_lent_buffer() -> None:
    shelf = BufferPool(layout(10))
    page = shelf.take()
    reader = page.lend()
    shelf.put_back(page)
    assert shelf.take() is not page
    del reader
    assert shelf.take() is page
