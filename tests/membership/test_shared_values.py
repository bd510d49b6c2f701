"""Values that processes leave for each other with the coordinator: who waits is answered when all of them are there."""

from __future__ import annotations

import pytest

from evener.membership import shared_values
from evener.membership.shared_values import AskValues, SetValue, SharedValues, Values
from evener.records.errors import InvalidInput
from support.refusals import refused


def test_waiting_request_is_answered_with_the_last_value() -> None:
    values = SharedValues()
    assert list(values.answers(1, AskValues(number=7, keys=("a", "b"), waits=True))) == []
    assert list(values.answers(2, SetValue(number=1, key="a", value=b"x"))) == [(2, Values(number=1, values=()))]
    assert list(values.answers(2, SetValue(number=2, key="b", value=b"y"))) == [
        (2, Values(number=2, values=())),
        (1, Values(number=7, values=(b"x", b"y"))),
    ]


def test_request_without_waiting_is_answered_at_once() -> None:
    values = SharedValues()
    assert list(values.answers(1, AskValues(number=1, keys=("a",), waits=False))) == [
        (1, Values(number=1, values=None))
    ]


def test_departed_process_gets_no_answer() -> None:
    values = SharedValues()
    assert list(values.answers(1, AskValues(number=1, keys=("a",), waits=True))) == []
    values.forget(1)
    assert len(list(values.answers(2, SetValue(number=1, key="a", value=b"")))) == 1


def test_rewritten_value_counts_once_and_too_many_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "MAX_BYTES", 300)
    values = SharedValues()
    for _ in range(20):
        list(values.answers(1, SetValue(number=1, key="beat", value=b"1")))
    with refused(InvalidInput):
        list(values.answers(1, SetValue(number=1, key="other", value=b"2")))
