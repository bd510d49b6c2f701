"""Contributions arrive in memory that is used again when nobody holds it."""

from __future__ import annotations

import numpy as np
from test_merge_stream import layout, sources

from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.intake import Intake
from evener.sync.packing import Packing

OF = layout(300)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_plain_contributions_arrive_where_they_are_merged() -> None:
    intake = Intake(OF, "none", Cores(1))
    inbox = intake.open("a")
    inbox[:] = sources(1, OF)[0].memory.data
    page = intake.take("a")
    assert page.flat.memory.ctypes.data == address(inbox)
    assert len(inbox) == intake.num_bytes == OF.num_bytes


def test_compressed_contributions_are_unpacked() -> None:
    intake, change = Intake(OF, "bf16", Cores(1)), sources(1, OF)[0]
    packing = Packing(OF, "bf16", Cores(1))
    image = np.zeros(packing.num_bytes, np.uint8)
    packing.pack(change, Flat(OF), image)
    intake.open("a")[:] = image.data
    np.testing.assert_allclose(intake.take("a").flat.floats[1], change.floats[1], rtol=2**-8)
    assert intake.num_bytes == packing.num_bytes < OF.num_bytes


def test_memory_goes_round() -> None:
    intake, seen = Intake(OF, "none", Cores(1)), set()
    for _ in range(10):
        for name in "ab":
            seen.add(address(intake.open(name)))
        for name in "ab":
            intake.reuse(intake.take(name))
    assert len(seen) == 2


def test_who_is_gone_leaves_its_memory_to_the_next() -> None:
    intake = Intake(OF, "none", Cores(1))
    first = address(intake.open("a"))
    intake.forget("a")
    assert address(intake.open("b")) == first


def test_an_inbox_that_somebody_still_holds_is_given_to_nobody_else() -> None:
    intake = Intake(OF, "none", Cores(1))
    held = intake.open("a")
    assert address(intake.open("a")) != address(held)
    intake.forget("a")
    assert address(intake.open("b")) != address(held)
