"""Contributions arrive in memory that is used again when nobody holds it."""

from __future__ import annotations

import numpy as np

from evener.agreements.aggregator import ReceiveBuffers
from evener.agreements.compression import Compressor
from evener.agreements.layout import Flat
from evener.agreements.threads import ThreadPool
from support.merge_cases import layout, sources

OF = layout(300)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_plain_contributions_arrive_in_the_merged_memory() -> None:
    buffers = ReceiveBuffers(OF, "none", ThreadPool(1))
    inbox = buffers.open("a")
    inbox[:] = sources(1, OF)[0].memory.data
    page = buffers.take("a")
    assert page.flat.memory.ctypes.data == address(inbox)
    assert len(inbox) == buffers.num_bytes == OF.num_bytes


def test_compressed_contributions_are_unpacked() -> None:
    buffers, change = ReceiveBuffers(OF, "bf16", ThreadPool(1)), sources(1, OF)[0]
    packing = Compressor(OF, "bf16", ThreadPool(1))
    image = np.zeros(packing.num_bytes, np.uint8)
    packing.pack(change, Flat(OF), image)
    buffers.open("a")[:] = image.data
    np.testing.assert_allclose(buffers.take("a").flat.floats[1], change.floats[1], rtol=2**-8)
    assert buffers.num_bytes == packing.num_bytes < OF.num_bytes


def test_receive_buffers_are_reused() -> None:
    buffers, seen = ReceiveBuffers(OF, "none", ThreadPool(1)), set()
    for _ in range(10):
        for name in "ab":
            seen.add(address(buffers.open(name)))
        for name in "ab":
            buffers.reuse(buffers.take(name))
    assert len(seen) == 2


def test_buffer_of_a_lost_worker_is_reused() -> None:
    buffers = ReceiveBuffers(OF, "none", ThreadPool(1))
    first = address(buffers.open("a"))
    buffers.forget("a")
    assert address(buffers.open("b")) == first


def test_buffer_still_held_is_not_reused() -> None:
    buffers = ReceiveBuffers(OF, "none", ThreadPool(1))
    held = buffers.open("a")
    assert address(buffers.open("a")) != address(held)
    buffers.forget("a")
    assert address(buffers.open("b")) != address(held)
