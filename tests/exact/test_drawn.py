"""Recipes that nobody wrote: networks, optimisers and outputs drawn at random, equal to one process or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from exact.divisions import WAYS
from exact.drawn import describe, name_of
from exact.known import cases_in, hold, known_failures
from exact.seek import check, shrunk
from exact.verdicts import IllegalRecipe, judge
from exact.worlds import Worlds, worlds

_FINDS = Path(__file__).with_name("finds.txt")


@pytest.fixture
def made() -> Iterator[Worlds]:
    with worlds() as found:
        yield found


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    return describe(lambda several: draw(st.sampled_from(several)))


def _hold_drawn(made: Worlds, seeds: range, ways: int = 3) -> None:
    bad = [one for seed in seeds for one in check(made, seed, ways) if not one.is_good]
    simplest = [shrunk(made, one) for one in bad[:5]]
    assert not bad, "\n".join(f"{one.verdict} {one.way}: {one.symptom}: {one.recipe}" for one in simplest)


@pytest.mark.timeout(600)
def test_drawn_recipes_are_equal_or_refused(made: Worlds) -> None:
    _hold_drawn(made, range(6), ways=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_recipes_are_equal_or_refused(made: Worlds) -> None:
    _hold_drawn(made, range(1000, 3000))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recorded_failures_are_equal_or_refused(made: Worlds) -> None:
    cases = cases_in(_FINDS)
    hold((one for way, name in cases for one in judge(made, name, [way])), known_failures("drawn"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(description=descriptions(), way=st.sampled_from(list(WAYS)))
def test_hypothesis_recipes_are_equal_or_refused(made: Worlds, description: dict[str, Any], way: str) -> None:
    try:
        (found,) = judge(made, name_of(description), [way])
    except IllegalRecipe:
        assume(False)
    assert found.is_good, f"{found.verdict}: {found.symptom}"
