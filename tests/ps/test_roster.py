"""The roster goes from one master to the next, and refuses what cannot be."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from playing import JOINED, LATE, Row, after, play

from evener.errors import InvalidValue
from evener.ps.roster import Roster, Standing


def test_a_snapshot_goes_through_json_and_a_clock_that_begins_elsewhere() -> None:
    roster = play([*JOINED, (1, "round 7", []), (3, "b 1 late", [
        f"round 7: close without node b: {LATE}",
        f"round 7: bench node b for 10 s: {LATE}",
    ])])  # fmt: skip
    text = msgspec.json.encode(roster.snapshot(5))
    read = msgspec.json.decode(text, type=Roster)
    assert read.opened == -4
    assert read.nodes["a"] == Standing(incarnation=1, state="present", heard=-5, member_since=-5, until=-5)
    restarted = read.restarted(1000)
    assert restarted.round == 7
    assert restarted.awaited == frozenset()
    assert restarted.nodes["a"].state == "expected"
    assert restarted.nodes["b"].until == 1008
    assert restarted.deadline("a") == 1030


def test_the_roster_names_when_time_alone_decides_something() -> None:
    assert Roster().wake() is None
    rows: list[Row] = [
        (10, "round 1", []),
        (14, "b 1 heard", []),
        (14, "a 1 heard", []),
        (14, "b 1 disconnected", ["round 1: expect node b back within 15 s: its connection broke"]),
    ]
    roster = play([*JOINED, *rows])
    assert roster.wake() == 14.4
    assert after(roster, "tick", 14.4).roster.wake() == 29


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"patience": 0.0}, "patience must be positive and finite, got 0.0"),
        ({"patience": inf}, "patience must be positive and finite, got inf"),
        ({"round": -1}, "round must be zero or more, got -1"),
        ({"opened": inf}, "opened must be finite, got inf"),
        ({"awaited": frozenset({"z"})}, r"awaited must be names of nodes, got \['z'\]"),
    ],
)
def test_a_roster_that_cannot_be_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        msgspec.structs.replace(Roster(), **fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"incarnation": -1}, "incarnation must be zero or more"),
        ({"doublings": 6}, "doublings must be from 0 to 5, got 6"),
        ({"lapses": -1}, "lapses must be zero or more"),
        ({"until": inf}, "until must be finite, got inf"),
    ],
)
def test_a_standing_that_cannot_be_is_refused(fields: dict[str, object], sentence: str) -> None:
    good = Standing(incarnation=1, state="present", heard=0.0, member_since=0.0, until=0.0)
    with pytest.raises(InvalidValue, match=sentence):
        msgspec.structs.replace(good, **fields)
