"""A transition is told in a sentence; a state goes from one master to the next, and what cannot be is refused."""

from __future__ import annotations

from math import inf
from typing import get_args

import msgspec
import pytest

from evener.ps.master.effects import EVENTS
from evener.ps.master.node_state import NodeState, Transition, TransitionKind
from evener.records.errors import InvalidValue
from support.membership_script import JOINED, LATE, play


@pytest.mark.parametrize(
    ("kind", "seconds", "sentence"),
    [
        ("exclude", 12.0, "round 4: exclude node n for 12 s: why"),
        ("expect", 1.5, "round 4: expect node n back within 1.5 s: why"),
        ("pass over", 0.0, "round 4: close without node n: why"),
        ("dismiss", 0.0, "round 4: dismiss node n: why"),
    ],
)
def test_transition_has_the_expected_sentence(kind: TransitionKind, seconds: float, sentence: str) -> None:
    assert str(Transition(kind=kind, node="n", round=4, reason="why", seconds=seconds)) == sentence


def test_every_transition_has_a_sentence_and_an_event_name() -> None:
    sentences = {str(Transition(kind=kind, node="n", round=1, reason="why")) for kind in get_args(TransitionKind)}
    assert len(sentences) == len(get_args(TransitionKind))
    assert set(EVENTS) == set(get_args(TransitionKind))


def test_state_survives_json_and_another_clock() -> None:
    scene = play([*JOINED, (1, "round 7", []), (3, "b 1 late", [
        f"round 7: close without node b: {LATE}",
        f"round 7: exclude node b for 10 s: {LATE}",
    ])])  # fmt: skip
    text = msgspec.json.encode({name: node.shifted(-5) for name, node in scene.nodes.items()})
    read = msgspec.json.decode(text, type=dict[str, NodeState])
    assert read["a"] == NodeState(incarnation=1, presence="present", heard=-5, member_since=-5, until=-5)
    restarted = {name: node.shifted(1000).restarted(1000) for name, node in read.items()}
    assert restarted["a"].presence == "expected"
    assert restarted["b"].until == 1008
    assert restarted["a"].deadline(15.0) == 1030


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"incarnation": -1}, "incarnation must be zero or more"),
        ({"doublings": 6}, "doublings must be from 0 to 5, got 6"),
        ({"lapses": -1}, "lapses must be zero or more"),
        ({"until": inf}, "until must be finite, got inf"),
    ],
)
def test_impossible_state_is_rejected(fields: dict[str, object], sentence: str) -> None:
    good = NodeState(incarnation=1, presence="present", heard=0.0, member_since=0.0, until=0.0)
    with pytest.raises(InvalidValue, match=sentence):
        msgspec.structs.replace(good, **fields)
