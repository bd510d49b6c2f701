"""Every sample of every epoch is given out until it is used."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.agreements.data_assigner import SampleCursor
from evener.agreements.messages import SampleRange, positions
from evener.records.errors import InvalidValue
from support.refusals import refused


@given(st.integers(1, 40), st.integers(1, 3), st.lists(st.tuples(st.integers(1, 15), st.booleans()), max_size=60))
def test_every_sample_is_used_once_despite_returns(
    num_samples: int, num_epochs: int, takes: list[tuple[int, bool]]
) -> None:
    supply, used, held = SampleCursor(num_samples, num_epochs), Counter[tuple[int, int]](), list[SampleRange]()
    for most, comes_back in takes:
        left = supply.num_remaining
        portion = supply.take(most)
        if portion is None:
            assert left == 0
            continue
        assert portion.num_samples == min(most, left)
        if comes_back:
            held.append(portion)
        else:
            used.update((portion.epoch, int(p)) for p in positions(portion))
        if len(held) > 2:
            supply.give_back(held.pop(0))
    for portion in held:
        supply.give_back(portion)
    while portion := supply.take(7):
        used.update((portion.epoch, int(p)) for p in positions(portion))
    assert used == {(epoch, p): 1 for epoch in range(num_epochs) for p in range(num_samples)}


def test_returned_samples_go_out_first_within_their_epoch() -> None:
    supply = SampleCursor(10, 2)
    first, second = supply.take(4), supply.take(4)
    assert first is not None
    assert second is not None
    supply.give_back(first)
    assert supply.num_remaining == 6
    assert supply.take(5) == SampleRange(epoch=0, ranges=((0, 4), (8, 1)))
    supply.give_back(second)
    assert supply.take(99) == SampleRange(epoch=0, ranges=((4, 4), (9, 1)))
    assert supply.take(99) == SampleRange(epoch=1, ranges=((0, 10),))
    assert (supply.num_remaining, supply.take(1)) == (0, None)


def test_late_return_of_an_old_epoch_precedes_the_new_epoch() -> None:
    supply = SampleCursor(4, 2)
    old = supply.take(4)
    assert old is not None
    supply.take(1)
    supply.give_back(old)
    assert supply.num_remaining == 4
    assert supply.take(9) == old
    assert supply.take(9) == SampleRange(epoch=1, ranges=((1, 3),))


def test_resumed_cursor_gives_the_same_samples() -> None:
    supply = SampleCursor(10, None)
    portion = supply.take(3)
    assert portion is not None
    supply.take(9)
    supply.give_back(portion)
    other = SampleCursor.resume(supply.state(), None)
    assert [other.take(4) for _ in range(5)] == [supply.take(4) for _ in range(5)]


@pytest.mark.parametrize(("num_samples", "num_epochs"), [(0, 1), (5, 0)])
def test_cursor_without_samples_or_epochs_is_rejected(num_samples: int, num_epochs: int) -> None:
    with refused(InvalidValue):
        SampleCursor(num_samples, num_epochs)
