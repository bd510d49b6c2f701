"""What the master believes of speeds: measurements count a quarter, absurd ones are held back."""

from __future__ import annotations

from math import inf, nan

import pytest

from evener.ps.belief import MOST_SLOWING, Beliefs
from evener.sync.messages import Push


def test_of_an_unknown_node_the_middling_speed_is_expected() -> None:
    beliefs = Beliefs({"a": 1.0, "b": 2.0, "c": 9.0})
    assert beliefs.expect("new") == 2.0
    assert beliefs.expect("a") == 1.0
    assert Beliefs().expect("first") == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_a_benchmark_that_makes_no_sense_is_not_believed(seconds: float) -> None:
    beliefs = Beliefs({"a": 1.0})
    beliefs.benchmarked("a", seconds)
    assert beliefs.of(["a"]) == {"a": 1.0}
    beliefs.benchmarked("a", 0.5)
    assert beliefs.of(["a"]) == {"a": 0.5}


def test_who_was_late_is_taken_to_be_half_as_fast_each_time() -> None:
    beliefs = Beliefs({"a": 1.0, "b": 1.0})
    beliefs.disappointed("a")
    beliefs.disappointed("a")
    assert beliefs.of(["a", "b"]) == {"a": 4.0, "b": 1.0}


def test_a_measurement_counts_a_quarter() -> None:
    beliefs = Beliefs({"a": 1.0})
    push = Push(number=7, seconds=20.0)
    assert beliefs.observe("a", push, 10) is push
    assert beliefs.of(["a"]) == {"a": 1.0 + 0.25 * (2.0 - 1.0)}


def test_who_was_stopped_once_is_not_slow_for_good() -> None:
    beliefs = Beliefs({"a": 1.0})
    believed = beliefs.observe("a", Push(number=7, seconds=1000.0, loss=0.5), 10)
    assert (believed.number, believed.loss) == (7, 0.5)
    assert believed.seconds == MOST_SLOWING * 10
    assert beliefs.of(["a"]) == {"a": 1.75}
