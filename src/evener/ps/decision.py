"""What `membership` is told, and what it answers: events, and decisions with their reasons in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from evener.ps.roster import Roster
from evener.schema import Part

What: TypeAlias = Literal["joined", "heard", "contributed", "refused", "late", "disconnected", "goodbye"]
"""joined: asked to take part, over a new connection. heard: any message or heartbeat. contributed: a good update, if
a round is open to that one. refused: an update that cannot be used (not finite, of a wrong shape). late: heard, but the
round has waited long enough. disconnected: the connection over which it joined last is gone. goodbye: has left."""

Verdict: TypeAlias = Literal[
    "admit", "resume", "replace", "take back", "expect", "wait", "pass over", "bench", "dismiss", "release"
]  # fmt: skip

_SENTENCES: dict[Verdict, str] = {
    "admit": "take in node {node}",
    "resume": "go on with node {node}",
    "replace": "replace node {node}",
    "take back": "take back node {node}",
    "expect": "expect node {node} back within {seconds:.3g} s",
    "wait": "let node {node} wait for {seconds:.3g} s",
    "pass over": "close without node {node}",
    "bench": "bench node {node} for {seconds:.3g} s",
    "dismiss": "dismiss node {node}",
    "release": "let node {node} go",
}


class Event(Part, frozen=True, kw_only=True):
    """Something that happened to one process of one node."""

    what: What
    node: str
    incarnation: int


class Decision(Part, frozen=True, kw_only=True):
    """Something to do.

    Attributes:
        verdict: admit, resume, replace, take back: send it the current weights, let it contribute from the next round
            on (resume: to the open one too). expect: nothing yet. wait, bench: tell it how long. pass over: the open
            round closes without it. dismiss, release, and replace for the earlier process: close its connection.
        node: name.
        round: that was open.
        reason: in words.
        seconds: from now, of expect, wait and bench.
    """

    verdict: Verdict
    node: str
    round: int
    reason: str
    seconds: float = 0.0

    def __str__(self) -> str:
        action = _SENTENCES[self.verdict].format(node=self.node, seconds=self.seconds)
        return f"round {self.round}: {action}: {self.reason}"


class Outcome(NamedTuple):
    """The roster from now on, and what to do, in this order."""

    roster: Roster
    decisions: tuple[Decision, ...] = ()

    def then(self, rule: Callable[..., Outcome], *words: Any, **more: Any) -> Outcome:
        """What follows if `rule` is applied to this roster; its decisions come after these."""
        roster, decisions = rule(self.roster, *words, **more)
        return Outcome(roster, (*self.decisions, *decisions))
