"""Who is a member now: a pure function of the roster, of what happened, and of time. It decides, and does nothing.

    joined           -> taken in; while benched, told how long it has to wait
    connection lost  -> away; back within the patience, it is the same member. The open round waits for it for a tenth
                        of the time that it has been open, but no longer than the patience
    silent           -> after the patience benched, as is who is late, and who lapses three times between good updates
    benched          -> taken back when it is heard after its cool-down: 10 s, 20 s, 40 s ... (see `roster`)
    started anew     -> the later process replaces the earlier one, which is dismissed should it speak again

`now` is a clock that does not go back; only differences of it count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from evener.ps.decision import Decision, Event, Outcome, Verdict, What
from evener.ps.roster import FIRST_COOL_DOWN, FORGIVEN_AFTER, MOST_DOUBLINGS, Roster, Standing, State

MOST_LAPSES = 3
"""Lapses between good updates that bench a node: one bad update, or one crash, can happen to anybody."""

HOLD_UP = 0.1
"""Of the time that a round has been open, what it waits for a member whose connection broke: a step of a few
milliseconds goes on at once, a round of minutes does not throw away that member's work because of a second's cut."""


def open_round(roster: Roster, number: int, now: float) -> Roster:
    """The roster in round `number`, to which everybody present is asked to contribute."""
    return replace(roster, round=number, opened=now, awaited=frozenset(roster.present))


def tick(roster: Roster, now: float) -> Outcome:
    """What follows from the time alone; to be called at `roster.wake()` or soon after it."""
    outcome = Outcome(roster)
    for name in sorted(roster.nodes):
        node = roster.nodes[name]
        if node.is_member and now >= roster.deadline(name):
            outcome = outcome.then(_bench, name, now, _silence(node, now))
        elif node.state == "away" and now >= node.until:
            outcome = outcome.then(_pass_over, name, "its connection broke")
    return outcome


def decide(roster: Roster, event: Event, now: float) -> Outcome:
    """What follows from `event`; an update to a round counts only if its node was awaited before."""
    node = roster.nodes.get(event.node)
    if event.what == "joined":
        return _join(roster, event, now)
    if node is None or node.state == "left" or node.incarnation != event.incarnation:
        return _turn_away(roster, event)
    return _RULES[event.what](roster, event.node, now)


def _join(roster: Roster, event: Event, now: float) -> Outcome:
    name, node = event.node, roster.nodes.get(event.node)
    if node is None:
        fresh = Standing(incarnation=event.incarnation, state="left", heard=now, member_since=now, until=now)
        return _enter(_with(roster, name, fresh), name, now)
    if node.incarnation == event.incarnation or not node.is_member:
        return _enter(_change(roster, name, incarnation=event.incarnation), name, now)
    if event.incarnation < node.incarnation:
        return _turn_away(roster, event)
    outcome = _lapse(_change(roster, name, incarnation=event.incarnation), name, now, "its process was restarted")
    return outcome.then(_enter, name, now, ("replace", "a later process of it joined"))


def _enter(roster: Roster, name: str, now: float, entrance: tuple[Verdict, str] | None = None) -> Outcome:
    """The node is there: a member from now on, unless its cool-down is not over."""
    node = roster.nodes[name]
    if not node.is_member and now < node.until:
        waiting = _change(roster, name, state="benched", heard=now)
        return _decided(waiting, "wait", name, "its cool-down is not over", node.until - now)
    if not node.is_member:
        roster = _change(roster, name, member_since=now)
    verdict, reason = entrance or _ENTRANCES[node.state]
    return _decided(_change(roster, name, state="present", heard=now), verdict, name, reason)


_ENTRANCES: dict[State, tuple[Verdict, str]] = {
    "left": ("admit", "it joined"),
    "benched": ("take back", "it is heard after its cool-down"),
    "away": ("resume", "it is back in time"),
    "expected": ("resume", "it found the restarted master"),
    "present": ("resume", "it connected anew"),
}


def _hear(roster: Roster, name: str, now: float) -> Outcome:
    node = roster.nodes[name]
    if node.state == "present" or (node.state == "benched" and now < node.until):
        return Outcome(_change(roster, name, heard=now))
    return _enter(roster, name, now)


def _contribute(roster: Roster, name: str, now: float) -> Outcome:
    node = roster.nodes[name]
    if not node.is_member:
        return _enter(roster, name, now)
    outcome = Outcome(roster) if node.state == "present" else _enter(roster, name, now)
    nodes = {**roster.nodes, name: replace(outcome.roster.nodes[name], heard=now, lapses=0)}  # every update comes here
    awaited = outcome.roster.awaited - {name}
    return Outcome(replace(outcome.roster, nodes=nodes, awaited=awaited), outcome.decisions)


def _refuse(roster: Roster, name: str, now: float) -> Outcome:
    if not roster.nodes[name].is_member:
        return _enter(roster, name, now)
    return _hear(roster, name, now).then(_lapse, name, now, "its update was refused")


def _be_late(roster: Roster, name: str, now: float) -> Outcome:
    reason = "its update did not come in time"
    if roster.nodes[name].state == "present":
        return _bench(roster, name, now, f"it is heard, but {reason}")
    return _pass_over(roster, name, reason)


def _disconnect(roster: Roster, name: str, now: float) -> Outcome:
    if roster.nodes[name].state != "present":
        return Outcome(roster)
    hold_up = min(roster.patience, HOLD_UP * (now - roster.opened))
    away = _change(roster, name, state="away", until=now + hold_up)
    return _decided(away, "expect", name, "its connection broke", roster.deadline(name) - now)


def _say_goodbye(roster: Roster, name: str, now: float) -> Outcome:
    node, reason = roster.nodes[name], "it said goodbye"
    outcome = _pass_over(roster, name, reason)
    until = node.until if node.state == "benched" else now
    gone = _change(outcome.roster, name, state="left", until=until, doublings=_doublings(roster, node))
    return Outcome(gone, outcome.decisions).then(_decided, "release", name, reason)


_RULES: dict[What, Callable[[Roster, str, float], Outcome]] = {
    "heard": _hear,
    "contributed": _contribute,
    "refused": _refuse,
    "late": _be_late,
    "disconnected": _disconnect,
    "goodbye": _say_goodbye,
}


def _turn_away(roster: Roster, event: Event) -> Outcome:
    """What a process is told that is not the node's: it never joined, said goodbye, or has been replaced."""
    if event.what not in ("joined", "heard", "contributed", "refused"):
        return Outcome(roster)
    node = roster.nodes.get(event.node)
    replaced = node is not None and node.is_member and event.incarnation < node.incarnation
    reason = "a later process of that name has taken its place" if replaced else "it has to join first"
    return _decided(roster, "dismiss", event.node, reason)


def _lapse(roster: Roster, name: str, now: float, reason: str) -> Outcome:
    lapses = roster.nodes[name].lapses + 1
    if lapses < MOST_LAPSES:
        return _pass_over(_change(roster, name, lapses=lapses), name, reason)
    return _bench(roster, name, now, f"{reason}, the {MOST_LAPSES}rd lapse without a good update between")


def _bench(roster: Roster, name: str, now: float, reason: str) -> Outcome:
    doublings = _doublings(roster, roster.nodes[name])
    seconds = roster.patience * FIRST_COOL_DOWN * 2**doublings
    roster, decisions = _pass_over(roster, name, reason)
    more = min(doublings + 1, MOST_DOUBLINGS)
    benched = _change(roster, name, state="benched", until=now + seconds, doublings=more, lapses=0)
    return Outcome(benched, decisions).then(_decided, "bench", name, reason, seconds)


def _doublings(roster: Roster, node: Standing) -> int:
    """Doublings of the node's next cool-down, less those that its membership since the last one has earned back."""
    if not node.is_member:
        return node.doublings
    return max(0, node.doublings - int((node.heard - node.member_since) / (FORGIVEN_AFTER * roster.patience)))


def _pass_over(roster: Roster, name: str, reason: str) -> Outcome:
    if name not in roster.awaited:
        return Outcome(roster)
    return _decided(replace(roster, awaited=roster.awaited - {name}), "pass over", name, reason)


def _silence(node: Standing, now: float) -> str:
    if node.state == "expected":
        return f"it did not come back within {now - node.heard:.3g} s of the master's restart"
    return f"it has been silent for {now - node.heard:.3g} s"


def _decided(roster: Roster, verdict: Verdict, name: str, reason: str, seconds: float = 0.0) -> Outcome:
    return Outcome(roster, (Decision(verdict=verdict, node=name, round=roster.round, reason=reason, seconds=seconds),))


def _change(roster: Roster, name: str, **fields: Any) -> Roster:
    return _with(roster, name, replace(roster.nodes[name], **fields))


def _with(roster: Roster, name: str, node: Standing) -> Roster:
    return replace(roster, nodes={**roster.nodes, name: node})
