"""Membership of a master's nodes: a pure function of a node's state, an occurrence, and time. It decides, and does
nothing. The membership of ranks is in `membership/`.

    joined           -> admitted; while excluded, informed how long it has to wait
    connection lost  -> away; if it reconnects within the patience, it is the same member. The open round waits for it
                        for a tenth of the time that it has been open, but no longer than the patience
    silent           -> excluded after the patience; so is a late node, and one with three lapses between good updates
    excluded         -> readmitted when it responds after its exclusion: 10 s, 20 s ... of a patience of 15 s
    restarted        -> the later process replaces the earlier one, which is dismissed if it sends anything

Times are those of a monotonic clock; only their differences count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from evener.ps.master.node_state import (
    MAX_DOUBLINGS,
    Decision,
    NodeState,
    Occurrence,
    OpenRound,
    Presence,
    Transition,
    TransitionKind,
)

FIRST_EXCLUSION = 2 / 3
"""First exclusion in patiences: 10 s of 15 s."""
FORGIVEN_AFTER = 10
"""Patiences of unbroken membership that cancel one doubling. Losing a node can cost the others one patience, so a node
that is lost more often than once in ten patiences stays away longer each time.
"""
MAX_LAPSES = 3
"""Lapses between good updates after which a node is excluded: a single bad update, or crash, is tolerated."""
HOLD_UP = 0.1
"""Share of the time that a round has been open for which it waits for a member whose connection broke: a step of a few
milliseconds continues at once, and a round of minutes does not lose that member's work because of a short cut.
"""


def decide(
    name: str, state: NodeState | None, what: Occurrence, incarnation: int, now: float, round: OpenRound
) -> Decision:
    """Decide on an occurrence of one process of a node.

    Args:
        name: name of the node.
        state: state of the node; None if it is unknown.
        what: the occurrence.
        incarnation: incarnation of the process.
        now: time of the occurrence.
        round: the open round.
    """
    if what == "joined":
        known = state or NodeState(incarnation=incarnation, presence="left", heard=now, member_since=now, until=now)
        case = _Case(name, known, now, round)
        case.join(incarnation)
    elif state is None or state.presence == "left" or state.incarnation != incarnation:
        return _turn_away(name, state, what, incarnation, round)
    else:
        case = _Case(name, state, now, round)
        _RULES[what](case)
    return Decision(case.state, tuple(case.transitions), case.is_awaited)


def tick(name: str, state: NodeState, now: float, round: OpenRound) -> Decision:
    """Decide on the passing of time; call it regularly."""
    case = _Case(name, state, now, round)
    if state.is_member and now >= state.deadline(round.patience):
        case.exclude(_silence(state, now, round.patience))
    elif state.presence == "away" and now >= state.until:
        case.pass_over("its connection broke")
    return Decision(case.state, tuple(case.transitions), case.is_awaited)


class _Case:
    """One decision in progress."""

    def __init__(self, name: str, state: NodeState, now: float, round: OpenRound) -> None:
        self.name, self.state, self.now, self.round = name, state, now, round
        self.is_awaited = round.is_awaited
        self.transitions: list[Transition] = []

    def join(self, incarnation: int) -> None:
        before = self.state
        if before.is_member and incarnation < before.incarnation:
            self.transitions.extend(_turn_away(self.name, before, "joined", incarnation, self.round).transitions)
            return
        if before.is_member and incarnation > before.incarnation:
            self._change(incarnation=incarnation)
            self._lapse("its process was restarted")
            self._enter(("replace", "a later process of it joined"))
            return
        self._change(incarnation=incarnation)
        self._enter()

    def hear(self) -> None:
        presence = self.state.presence
        if presence == "present" or (presence == "excluded" and self.now < self.state.until):
            self._change(heard=self.now)
        else:
            self._enter()

    def contribute(self) -> None:
        was_member = self.state.is_member
        if self.state.presence != "present":
            self._enter()
        if was_member:
            self._change(heard=self.now, lapses=0)
            self.is_awaited = False

    def refuse(self) -> None:
        if not self.state.is_member:
            self._enter()
            return
        self.hear()
        self._lapse("its update was refused")

    def be_late(self) -> None:
        reason = "its update did not come in time"
        if self.state.presence == "present":
            self.exclude(f"it is heard, but {reason}")
        else:
            self.pass_over(reason)

    def disconnect(self) -> None:
        if self.state.presence == "present":
            hold_up = min(self.round.patience, HOLD_UP * (self.now - self.round.opened))
            self._change(presence="away", until=self.now + hold_up)
            self._add("expect", "its connection broke", self.state.deadline(self.round.patience) - self.now)

    def say_goodbye(self) -> None:
        state, reason = self.state, "it said goodbye"
        self.pass_over(reason)
        until = state.until if state.presence == "excluded" else self.now
        self._change(presence="left", until=until, doublings=self._doublings())
        self._add("release", reason)

    def exclude(self, reason: str) -> None:
        doublings = self._doublings()
        seconds = self.round.patience * FIRST_EXCLUSION * 2**doublings
        self.pass_over(reason)
        more = min(doublings + 1, MAX_DOUBLINGS)
        self._change(presence="excluded", until=self.now + seconds, doublings=more, lapses=0)
        self._add("exclude", reason, seconds)

    def pass_over(self, reason: str) -> None:
        if self.is_awaited:
            self.is_awaited = False
            self._add("pass over", reason)

    def _enter(self, entrance: tuple[TransitionKind, str] | None = None) -> None:
        """Make the responding node a member, unless its exclusion is not over."""
        state = self.state
        if not state.is_member and self.now < state.until:
            self._change(presence="excluded", heard=self.now)
            self._add("wait", "it came back before its exclusion was over", state.until - self.now)
            return
        if not state.is_member:
            self._change(member_since=self.now)
        self._change(presence="present", heard=self.now)
        self._add(*(entrance or _ENTRANCES[state.presence]))

    def _lapse(self, reason: str) -> None:
        lapses = self.state.lapses + 1
        if lapses < MAX_LAPSES:
            self._change(lapses=lapses)
            self.pass_over(reason)
        else:
            self.exclude(f"{reason}, the {MAX_LAPSES}rd lapse without a good update between")

    def _doublings(self) -> int:
        """Return the doublings of the next exclusion, less those that unbroken membership has cancelled."""
        state = self.state
        if not state.is_member:
            return state.doublings
        return max(
            0, state.doublings - int((state.heard - state.member_since) / (FORGIVEN_AFTER * self.round.patience))
        )

    def _change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def _add(self, kind: TransitionKind, reason: str, seconds: float = 0.0) -> None:
        self.transitions.append(
            Transition(kind=kind, node=self.name, round=self.round.number, reason=reason, seconds=seconds)
        )


_ENTRANCES: dict[Presence, tuple[TransitionKind, str]] = {
    "left": ("admit", "it joined"),
    "excluded": ("take back", "it responds after its exclusion"),
    "away": ("resume", "it is back in time"),
    "expected": ("resume", "it found the restarted master"),
    "present": ("resume", "it reconnected"),
}
_RULES: dict[Occurrence, Callable[[_Case], None]] = {
    "heard": _Case.hear,
    "contributed": _Case.contribute,
    "refused": _Case.refuse,
    "late": _Case.be_late,
    "disconnected": _Case.disconnect,
    "goodbye": _Case.say_goodbye,
}


def _turn_away(name: str, state: NodeState | None, what: Occurrence, incarnation: int, round: OpenRound) -> Decision:
    """Decide on a message of a process that is not a member's: it never joined, has left, or has been replaced."""
    if what not in ("joined", "heard", "contributed", "refused"):
        return Decision(state, (), round.is_awaited)
    replaced = state is not None and state.is_member and incarnation < state.incarnation
    reason = "a later process of that name has taken its place" if replaced else "it has to join first"
    return Decision(
        state, (Transition(kind="dismiss", node=name, round=round.number, reason=reason),), round.is_awaited
    )


def _silence(state: NodeState, now: float, patience: float) -> str:
    if state.presence == "expected":
        return f"it did not come back within {now - state.heard:.3g} s of the master's restart"
    return f"it has been silent for {patience:g} s"
