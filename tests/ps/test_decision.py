"""A decision is told in a sentence with node, round, seconds and reason."""

from __future__ import annotations

from typing import get_args

import pytest

from evener.ps.consequences import EVENTS
from evener.ps.decision import Decision, Outcome, Verdict
from evener.ps.roster import Roster


@pytest.mark.parametrize(
    ("verdict", "seconds", "sentence"),
    [
        ("bench", 12.0, "round 4: bench node n for 12 s: why"),
        ("expect", 1.5, "round 4: expect node n back within 1.5 s: why"),
        ("pass over", 0.0, "round 4: close without node n: why"),
        ("dismiss", 0.0, "round 4: dismiss node n: why"),
    ],
)
def test_literal_sentences(verdict: Verdict, seconds: float, sentence: str) -> None:
    assert str(Decision(verdict=verdict, node="n", round=4, reason="why", seconds=seconds)) == sentence


def test_every_verdict_has_a_sentence_and_a_name_in_the_record() -> None:
    sentences = {str(Decision(verdict=verdict, node="n", round=1, reason="why")) for verdict in get_args(Verdict)}
    assert len(sentences) == len(get_args(Verdict))
    assert set(EVENTS) == set(get_args(Verdict))


def test_what_follows_a_rule_comes_after_what_was_decided_before() -> None:
    def rule(roster: Roster, node: str) -> Outcome:
        return Outcome(roster, (Decision(verdict="release", node=node, round=roster.round, reason="why"),))

    outcome = Outcome(Roster()).then(rule, "a").then(rule, "b")
    assert [decision.node for decision in outcome.decisions] == ["a", "b"]
