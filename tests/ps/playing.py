"""Plays a sequence of events, ticks and rounds, written as words, to membership."""

from __future__ import annotations

import msgspec

from evener.ps.decision import Event, Outcome
from evener.ps.membership import decide, open_round, tick
from evener.ps.roster import Roster

Row = tuple[float, str, list[str]]
"""Time, what happens (`node incarnation what`, `round n`, `tick`), and the sentences of the decisions."""


def after(roster: Roster, words: str, now: float) -> Outcome:
    """What follows from one row's words."""
    match words.split():
        case ["tick"]:
            return tick(roster, now)
        case ["round", number]:
            return Outcome(open_round(roster, int(number), now))
        case ["restart"]:
            return Outcome(roster.snapshot(now).restarted(now))
        case [node, incarnation, what]:
            event = {"what": what, "node": node, "incarnation": int(incarnation)}
            return decide(roster, msgspec.convert(event, Event), now)
    raise AssertionError(words)


def play(rows: list[Row]) -> Roster:
    """The roster after all rows, each of which must give its decisions."""
    roster = Roster()
    for now, words, expected in rows:
        roster, decisions = after(roster, words, now)
        assert [str(decision) for decision in decisions] == expected, f"at {now}: {words}"
    return roster


LATE = "it is heard, but its update did not come in time"

JOINED: list[Row] = [
    (0, "a 1 joined", ["round 0: take in node a: it joined"]),
    (0, "b 1 joined", ["round 0: take in node b: it joined"]),
]
