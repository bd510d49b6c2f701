"""The validations of a run come one after the other, with the weights of their time, whoever is lost amid them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from linear import VALIDATION, job, weights
from test_master import SYNC

from evener.ps.messages import Validate, Validated
from evener.ps.validations import Validations

COSTS = {"a": 1.0, "b": 1.0}


class Box:
    """A post that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Validate, bytes]] = []

    def send(self, name: str, header: Any, buffers: Sequence[Any] = ()) -> None:
        self.sent.append((name, header, bytes(buffers[0])))

    def is_sending(self, name: str) -> bool:
        raise AssertionError(f"the run asks for {name}")

    def tell(self, word: Any) -> None:
        raise AssertionError("the run tells")


def make(costs: dict[str, float]) -> tuple[Validations, Box]:
    box, times = Box(), iter(range(100))
    return Validations(job(SYNC), box, lambda: float(next(times)), lambda: costs), box


def answer(number: int, loss: float = 1.0) -> Validated:
    return Validated(run="linear-1", number=number, loss=loss, correct=2.0)


def test_everybody_gets_a_slice_with_a_copy_of_the_weights() -> None:
    validations, box = make(COSTS)
    state = weights()
    validations.add(0, 5, state)
    before = bytes(state.memory)
    state.memory[:] = 7
    assert [(name, header.first, header.size) for name, header, _ in box.sent] == [("a", 0, 11), ("b", 11, 10)]
    assert all(image == before for *_, image in box.sent)


def test_the_result_names_epoch_version_and_seconds_and_the_next_one_begins_after_it() -> None:
    validations, box = make(COSTS)
    validations.add(0, 5, weights())
    validations.add(1, 9, weights())
    assert list(validations.due) == [0, 1]
    assert len(box.sent) == 2
    assert validations.answer(answer(0)) == (True, None)
    assert validations.answer(answer(0)) == (False, None)
    is_news, found = validations.answer(answer(1, loss=20.0))
    assert is_news
    assert found is not None
    assert (found.epoch, found.step, found.loss, found.seconds) == (0, 5, 1.0, 1.0)
    assert found.accuracy == 4.0 / VALIDATION
    assert list(validations.due) == [1]
    validations.give_out()
    assert [header.number for _, header, _ in box.sent[2:]] == [2, 3]


def test_an_answer_that_nobody_awaits_changes_nothing() -> None:
    validations, _ = make(COSTS)
    assert validations.answer(answer(0)) == (False, None)


def test_a_loss_that_is_not_finite_becomes_the_largest_number_that_a_file_can_hold() -> None:
    validations, _ = make({"a": 1.0})
    validations.add(0, 1, weights())
    _, found = validations.answer(answer(0, loss=float("inf")))
    assert found is not None
    assert found.loss == sys.float_info.max


def test_nothing_is_given_out_before_somebody_works_and_slices_of_the_lost_go_to_others() -> None:
    costs: dict[str, float] = {}
    validations, box = make(costs)
    validations.add(0, 1, weights())
    assert box.sent == []
    costs.update(COSTS)
    validations.give_out()
    del costs["a"]
    validations.give_out()
    assert [(name, header.number) for name, header, _ in box.sent] == [("a", 0), ("b", 1), ("b", 0)]


def test_slices_of_the_late_go_to_others_although_they_still_work() -> None:
    validations, box = make(COSTS)
    validations.add(0, 1, weights())
    validations.give_out()
    assert len(box.sent) == 2
    validations.give_out(also_of_the_late=True)
    assert [(name, header.number) for name, header, _ in box.sent[2:]] == [("b", 0), ("a", 1)]
