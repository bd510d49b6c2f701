"""Validation in slices: by speed, each once, those of the lost by others; one pass after the other."""

from __future__ import annotations

import sys
from math import isnan, nan

import pytest

from evener.ps.master.validation import EpochEnd, SlicesForNode, ValidationPass, Validations
from evener.ps.protocol.messages import Validated, ValidationSlice
from support.agreements import SYNC
from support.linear_engine import VALIDATION, costs, job, weights

COSTS = costs({"a": 1.0, "b": 1.0})


def test_slices_follow_speed_and_cover_every_sample_once() -> None:
    one = ValidationPass(10, costs({"fast": 1.0, "slow": 4.0}), first_number=5)
    assert one.slices_of("fast") == [ValidationSlice(5, 0, 8)]
    assert one.slices_of("slow") == [ValidationSlice(6, 8, 2)]
    assert one.owners == ["fast", "slow"]
    assert one.next_number == 7


def test_very_slow_node_gets_no_slice() -> None:
    one = ValidationPass(2, costs({"fast": 1.0, "slow": 100.0}), first_number=0)
    assert one.owners == ["fast"]
    assert one.next_number == 1


def test_loss_and_accuracy_are_means_over_all_samples() -> None:
    one = ValidationPass(10, costs({"a": 1.0, "b": 1.0}), first_number=0)
    assert one.answer(0, 10.0, 4.0)
    assert not one.is_complete
    assert one.answer(1, 5.0, 1.0)
    assert one.is_complete
    assert (one.loss, one.accuracy) == (1.5, 0.5)


def test_slice_counts_once_by_its_first_answer() -> None:
    one = ValidationPass(10, costs({"a": 1.0, "b": 1.0}), first_number=0)
    assert one.answer(0, 10.0, 4.0)
    assert not one.answer(0, 99.0, 5.0)
    assert not one.answer(17, 99.0, 5.0)
    one.answer(1, 0.0, 0.0)
    assert one.loss == 1.0


def test_slices_of_lost_nodes_go_to_the_others_in_turn() -> None:
    one = ValidationPass(9, costs({"a": 1.0, "b": 1.0, "c": 1.0}), first_number=0)
    assert one.lease_again(["a"], []) == []
    assert one.slices_of("a") == [ValidationSlice(0, 0, 3)]
    assert one.lease_again(["a"], ["b", "c"]) == [(ValidationSlice(0, 0, 3), "b")]
    assert one.slices_of("a") == []
    assert one.slices_of("b") == [ValidationSlice(0, 0, 3), ValidationSlice(1, 3, 3)]
    assert [owner for _, owner in one.lease_again(["b"], ["c", "a"])] == ["c", "a"]


def test_slices_of_late_nodes_are_swapped_once() -> None:
    one = ValidationPass(9, costs({"a": 1.0, "b": 1.0}), first_number=0)
    assert one.lease_again(["a", "b"], ["a", "b"]) == [(ValidationSlice(0, 0, 5), "b"), (ValidationSlice(1, 5, 4), "a")]
    assert one.lease_again(["stranger"], ["a", "b"]) == []


@pytest.mark.parametrize("loss", [nan, float("inf")])
def test_non_finite_loss_is_not_hidden(loss: float) -> None:
    one = ValidationPass(1, costs({"a": 1.0}), first_number=0)
    one.answer(0, loss, 1.0)
    assert isnan(one.loss)
    assert one.accuracy == 1.0


def answer(number: int, loss: float = 1.0) -> Validated:
    return Validated(run="linear-1", number=number, loss=loss, correct=2.0)


def sent(messages: list[SlicesForNode]) -> list[tuple[str, int]]:
    return [(one.name, part.number) for one in messages for part in one.header.slices]


def test_every_node_gets_a_slice_with_the_weights() -> None:
    validations, state = Validations(job(SYNC)), weights()
    validations.add(EpochEnd(0, 5, state))
    before = bytes(state.memory)
    slices = validations.give_out(COSTS, 0.0)
    assert [(one.name, one.header.slices) for one in slices] == [
        ("a", (ValidationSlice(0, 0, 11),)),
        ("b", (ValidationSlice(1, 11, 10),)),
    ]
    assert all(bytes(one.weights) == before for one in slices)
    assert sent(validations.slices_of("b")) == [("b", 1)]


def test_result_names_epoch_version_and_seconds_before_the_next() -> None:
    validations = Validations(job(SYNC))
    validations.add(EpochEnd(0, 5, weights()))
    validations.add(EpochEnd(1, 9, weights()))
    assert [end.epoch for end in validations.due] == [0, 1]
    assert len(validations.give_out(COSTS, 3.0)) == 2
    assert validations.answer(answer(0), 3.5) == (True, None)
    assert validations.answer(answer(0), 3.5) == (False, None)
    is_news, found = validations.answer(answer(1, loss=20.0), 4.0)
    assert is_news
    assert found is not None
    assert (found.epoch, found.step, found.loss, found.seconds) == (0, 5, 1.0, 1.0)
    assert found.accuracy == 4.0 / VALIDATION
    assert [end.epoch for end in validations.due] == [1]
    assert sent(validations.give_out(COSTS, 5.0)) == [("a", 2), ("b", 3)]


def test_unexpected_answer_changes_nothing() -> None:
    assert Validations(job(SYNC)).answer(answer(0), 0.0) == (False, None)


def test_infinite_loss_becomes_the_largest_float() -> None:
    validations = Validations(job(SYNC))
    validations.add(EpochEnd(0, 1, weights()))
    validations.give_out(costs({"a": 1.0}), 0.0)
    _, found = validations.answer(answer(0, loss=float("inf")), 1.0)
    assert found is not None
    assert found.loss == sys.float_info.max


def test_slices_wait_for_workers_and_move_when_one_is_lost() -> None:
    validations = Validations(job(SYNC))
    validations.add(EpochEnd(0, 1, weights()))
    assert validations.give_out({}, 0.0) == []
    assert sent(validations.give_out(COSTS, 0.0)) == [("a", 0), ("b", 1)]
    assert sent(validations.give_out(costs({"b": 1.0}), 0.0)) == [("b", 0)]


def test_slice_of_a_node_that_works_on_without_answering_moves() -> None:
    validations = Validations(job(SYNC))
    assert not validations.contributed("a")
    validations.add(EpochEnd(0, 1, weights()))
    three = costs({"a": 1.0, "b": 1.0, "c": 1.0})
    assert sent(validations.give_out(three, 0.0)) == [("a", 0), ("b", 1), ("c", 2)]
    assert not validations.contributed("a")  # it had this lease before the slice
    assert validations.give_out(three, 0.0) == []
    assert validations.contributed("a")
    assert sent(validations.give_out(three, 0.0)) == [("b", 0)]
    assert [validations.contributed("b") for _ in range(2)] == [False, True]
    assert sent(validations.give_out(three, 0.0)) == [("c", 0), ("c", 1)]  # not back to a, which had it first
    for number in range(3):
        validations.answer(answer(number), 1.0)
    validations.add(EpochEnd(1, 2, weights()))
    assert sent(validations.give_out(three, 2.0)) == [("c", 3)]
    assert sent(validations.give_out(costs({"a": 1.0, "b": 1.0}), 2.0)) == [("a", 3)]  # there is no other node


def test_slices_of_late_nodes_go_to_the_others() -> None:
    validations = Validations(job(SYNC))
    validations.add(EpochEnd(0, 1, weights()))
    validations.give_out(COSTS, 0.0)
    assert validations.give_out(COSTS, 0.0) == []
    assert sent(validations.give_out(COSTS, 0.0, reassign_late=True)) == [("b", 0), ("a", 1)]
