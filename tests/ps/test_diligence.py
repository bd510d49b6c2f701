"""Slow work is told from none: a table of signs, and who is late."""

from __future__ import annotations

import pytest

from evener.ps.diligence import Diligence

PATIENCE = 15.0


@pytest.mark.parametrize(
    ("signs", "step_seconds", "now", "late"),
    [
        pytest.param({"a": 0}, {"a": 0.01}, 15.0, [], id="within the patience"),
        pytest.param({"a": 0}, {"a": 0.01}, 15.1, ["a"], id="after it"),
        pytest.param({"a": 0}, {"a": 60}, 74, [], id="amid a step of a minute"),
        pytest.param({"a": 0}, {"a": 60}, 76, ["a"], id="after a step of a minute and the patience"),
        pytest.param({"a": 3600}, {"a": 0.01}, 3610, [], id="an hour of steps, the last one lately"),
        pytest.param({"a": 0, "b": 10}, {"a": 1, "b": 1}, 20, ["a"], id="each by itself"),
        pytest.param({"a": 0, "b": 10}, {"b": 1}, 20, [], id="who has done its work is never late"),
    ],
)
def test_late_is_who_gave_no_sign_for_a_step_and_the_patience(
    signs: dict[str, float], step_seconds: dict[str, float], now: float, late: list[str]
) -> None:
    diligence = Diligence(PATIENCE, now=0.0)
    for name, when in signs.items():
        diligence.sign(name, when)
    assert diligence.late(step_seconds, now) == late


def test_the_latest_sign_is_anybody_s_and_who_is_gone_gave_none() -> None:
    diligence = Diligence(PATIENCE, now=2.0)
    assert diligence.latest == 2.0
    diligence.sign("a", 5.0)
    diligence.sign("b", 7.0)
    assert diligence.latest == 7.0
    diligence.forget("a")
    diligence.sign("a", 60.0)
    assert diligence.late({"a": 0.0}, 70.0) == []
