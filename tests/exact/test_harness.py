"""The check of the checks: what goes wrong on one rank is noticed, and costs no more than its own case."""

from __future__ import annotations

import json
from random import Random

import pytest

from exact.divisions import WAYS
from exact.drawn import describe, draw, shrink
from exact.recipe import KINDS, recipe_of, recipes_of
from exact.verdicts import GOOD, VERDICTS, Verdict, judge, table
from exact.worlds import worlds


def test_harness_detects_a_failure_on_one_rank_and_rebuilds_its_world() -> None:
    cases = {
        "sound": ("equal", ""),
        "differs": ("different", "loss 0 off by"),
        "differs_in_evaluation": ("different", "evaluation 0 off by"),
        "differs_in_abuffer": ("different", "seen off by"),
        "raises": ("traceback", "IndexError: planted"),
        "ends": ("traceback", "Ended"),
    }
    with worlds() as made:
        for name, (verdict, symptom) in cases.items():
            (found,) = judge(made, f"planted/{name}", ["data 7,2,1"], is_checked=False)
            assert found.verdict == verdict, name
            assert symptom in found.symptom


@pytest.mark.slow
def test_harness_detects_a_silent_rank() -> None:
    with worlds(limit=5) as made:
        (found,) = judge(made, "planted/sleeps", ["data 7,2,1"], is_checked=False)
        assert (found.verdict, found.symptom) == ("hang", "no rank ended")
        assert judge(made, "planted/sound", ["data 7,2,1"], is_checked=False)[0].verdict == "equal"


def test_every_way_divides_every_step_unevenly() -> None:
    for way in WAYS.values():
        plan = way.plan(2)
        assert len(plan.assignments) == way.size
        assert way.strategy == "pipeline" or len({a.share * a.samples for a in plan.assignments}) > 1


def test_names_identify_their_recipes() -> None:
    for kind in KINDS:
        for name, recipe in recipes_of(kind).items():
            assert recipe_of(f"{kind}/{name}") is recipe
    assert recipe_of(draw(3)).name == draw(3)


def test_shrinking_a_description_keeps_only_the_failing_part() -> None:
    description = describe(Random(5).choice, most=8)
    description["parts"] += [["residual", 3, [["conv", 1], ["activation", 2]]]]
    least = shrink(description, lambda one: '"conv"' in json.dumps(one["parts"]))
    assert json.dumps(least["parts"]).count("[") == 2


def test_table_counts_by_strategy_and_kind() -> None:
    rows = table([Verdict("hooks/a", "data 7,2,1", "equal"), Verdict("hooks/b", "sharded 5,0,3", "hang")])
    assert "| data | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 |" in rows
    assert "| hooks | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in rows
    assert set(GOOD) < set(VERDICTS)
