"""Tries are made at growing distances, and not by all nodes at once."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from evener.wire.pauses import pauses


@given(st.integers(0, 2**32), st.floats(0.01, 1), st.floats(1, 60))
def test_pauses_double_up_to_the_longest_and_are_spread(seed: int, first: float, longest: float) -> None:
    drawn = list(itertools.islice(pauses(Random(seed), first, longest), 20))
    for number, pause in enumerate(drawn):
        whole = min(first * 2**number, longest)
        assert whole / 2 <= pause <= whole


def test_two_nodes_do_not_knock_at_the_same_moments() -> None:
    assert list(itertools.islice(pauses(Random(1)), 9)) != list(itertools.islice(pauses(Random(2)), 9))
