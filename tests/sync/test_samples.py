"""Every sample of every epoch is given out until it is used."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import InvalidValue
from evener.sync import Portion, order_of, positions
from evener.sync.samples import Supply


@given(st.integers(1, 40), st.integers(1, 3), st.lists(st.tuples(st.integers(1, 15), st.booleans()), max_size=60))
def test_each_sample_is_used_once_whatever_comes_back(
    num_samples: int, num_epochs: int, takes: list[tuple[int, bool]]
) -> None:
    supply, used, held = Supply(num_samples, num_epochs), Counter[tuple[int, int]](), list[Portion]()
    for most, comes_back in takes:
        left = supply.left
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


def test_what_comes_back_goes_out_first_and_epochs_do_not_mix() -> None:
    supply = Supply(10, 2)
    first, second = supply.take(4), supply.take(4)
    assert first is not None
    assert second is not None
    supply.give_back(first)
    assert supply.left == 6
    assert supply.take(5) == Portion(epoch=0, ranges=((0, 4), (8, 1)))
    supply.give_back(second)
    assert supply.take(99) == Portion(epoch=0, ranges=((4, 4), (9, 1)))
    assert supply.take(99) == Portion(epoch=1, ranges=((0, 10),))
    assert (supply.left, supply.take(1)) == (0, None)


def test_a_late_return_of_an_old_epoch_goes_out_before_the_new_epoch() -> None:
    supply = Supply(4, 2)
    old = supply.take(4)
    assert old is not None
    supply.take(1)
    supply.give_back(old)
    assert supply.left == 4
    assert supply.take(9) == old
    assert supply.take(9) == Portion(epoch=1, ranges=((1, 3),))


def test_it_goes_on_from_a_mark() -> None:
    supply, other = Supply(10, None), Supply(10, None)
    portion = supply.take(3)
    assert portion is not None
    supply.take(9)
    supply.give_back(portion)
    other.resume(supply.mark())
    assert [other.take(4) for _ in range(5)] == [supply.take(4) for _ in range(5)]


@pytest.mark.parametrize(("num_samples", "num_epochs"), [(0, 1), (5, 0)])
def test_nothing_to_give_out_is_refused(num_samples: int, num_epochs: int) -> None:
    with pytest.raises(InvalidValue, match="must be positive"):
        Supply(num_samples, num_epochs)


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 10**6))
def test_an_order_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(order_of(num_samples, seed, epoch)) == list(range(num_samples))


def test_the_order_is_the_same_on_every_machine_for_ever() -> None:
    assert order_of(10, 0, 0).tolist() == [0, 7, 3, 1, 9, 5, 4, 6, 8, 2]
    assert order_of(10, 7, 3).tolist() == [8, 3, 7, 9, 0, 1, 5, 6, 2, 4]


def test_orders_differ_by_seed_and_epoch_and_are_even() -> None:
    orders = {tuple(order_of(30, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    places = np.mean([order_of(30, 1, epoch) for epoch in range(2000)], axis=0)
    np.testing.assert_allclose(places, 14.5, atol=1.0)
