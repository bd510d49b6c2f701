"""Validation in slices: by speed, each once, those of the lost by others."""

from __future__ import annotations

from math import isnan, nan

import pytest

from evener.ps.validation import Assessment, Slice


def test_slices_follow_speed_and_cover_every_sample_once() -> None:
    one = Assessment(10, {"fast": 1.0, "slow": 4.0}, first_number=5)
    assert one.slices_of("fast") == [Slice(5, 0, 8)]
    assert one.slices_of("slow") == [Slice(6, 8, 2)]
    assert one.owners == ["fast", "slow"]
    assert one.next_number == 7


def test_who_would_only_be_late_gets_no_slice() -> None:
    one = Assessment(2, {"fast": 1.0, "slow": 100.0}, first_number=0)
    assert one.owners == ["fast"]
    assert one.next_number == 1


def test_loss_and_accuracy_are_means_over_all_samples() -> None:
    one = Assessment(10, {"a": 1.0, "b": 1.0}, first_number=0)
    assert one.answer(0, 10.0, 4.0)
    assert not one.is_complete
    assert one.answer(1, 5.0, 1.0)
    assert one.is_complete
    assert (one.loss, one.accuracy) == (1.5, 0.5)


def test_a_slice_counts_once_whoever_answers_first() -> None:
    one = Assessment(10, {"a": 1.0, "b": 1.0}, first_number=0)
    assert one.answer(0, 10.0, 4.0)
    assert not one.answer(0, 99.0, 5.0)
    assert not one.answer(17, 99.0, 5.0)
    one.answer(1, 0.0, 0.0)
    assert one.loss == 1.0


def test_slices_of_the_lost_go_to_the_others_in_turn() -> None:
    one = Assessment(9, {"a": 1.0, "b": 1.0, "c": 1.0}, first_number=0)
    assert one.lease_again(["a"], []) == []
    assert one.slices_of("a") == [Slice(0, 0, 3)]
    assert one.lease_again(["a"], ["b", "c"]) == [(Slice(0, 0, 3), "b")]
    assert one.slices_of("a") == []
    assert one.slices_of("b") == [Slice(0, 0, 3), Slice(1, 3, 3)]
    assert [owner for _, owner in one.lease_again(["b"], ["c", "a"])] == ["c", "a"]


def test_slices_of_several_late_ones_change_hands_once_and_nobody_gets_its_own() -> None:
    one = Assessment(9, {"a": 1.0, "b": 1.0}, first_number=0)
    assert one.lease_again(["a", "b"], ["a", "b"]) == [(Slice(0, 0, 5), "b"), (Slice(1, 5, 4), "a")]
    assert one.lease_again(["stranger"], ["a", "b"]) == []


@pytest.mark.parametrize("loss", [nan, float("inf")])
def test_a_loss_that_is_not_finite_is_not_hidden(loss: float) -> None:
    one = Assessment(1, {"a": 1.0}, first_number=0)
    one.answer(0, loss, 1.0)
    assert isnan(one.loss)
    assert one.accuracy == 1.0
