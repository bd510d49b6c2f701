"""What membership knows of a node, what it is asked, and what it answers: transitions with their reasons in words."""

from __future__ import annotations

from math import isfinite
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from evener.records.errors import require
from evener.records.schema import Part
from evener.wire.connect import JOIN_SECONDS, MAX_PAUSE_SECONDS

MOST_DOUBLINGS = 5
"""The longest cool-down is 32 times the first, 320 s: no node is shut out for good."""
Presence: TypeAlias = Literal["present", "away", "expected", "benched", "left"]
"""present: a member with a connection. away: a member whose connection broke within the patience. expected: a member of
the time before the master restarted. benched: not a member before `until`, and then only when it is heard. left: said
goodbye."""

Occurrence: TypeAlias = Literal["joined", "heard", "contributed", "refused", "late", "disconnected", "goodbye"]
"""joined: asked to take part, over a new connection. heard: any message or heartbeat. contributed: a good update.
refused: an update that cannot be used (not finite, of a wrong shape). late: heard, but the round has waited long
enough. disconnected: the connection over which it joined last is gone. goodbye: has left."""

TransitionKind: TypeAlias = Literal[
    "admit", "resume", "replace", "take back", "expect", "wait", "pass over", "bench", "dismiss", "release"
]  # fmt: skip

_SENTENCES: dict[TransitionKind, str] = {
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


def return_seconds(patience: float) -> float:
    """Seconds that a node may take to come back to a restarted master.

    A node that has not noticed the master's end needs one patience to notice it and one to connect. A node that has
    noticed it may have tried in vain just before, and then makes its longest pause.
    """
    return max(2 * patience, MAX_PAUSE_SECONDS + JOIN_SECONDS)


class NodeState(Part, frozen=True, kw_only=True):
    """How one node stands with the master.

    Attributes:
        incarnation: of its process; one that was started later has a higher number.
        presence: see `Presence`.
        heard: when it was last heard; while it is expected, when the master restarted.
        member_since: when it was taken in, or back.
        until: benched, or left while benched: end of the cool-down; away: how long the open round waits for it.
        doublings: of its next cool-down.
        lapses: updates refused and processes restarted since its last good update.
    """

    incarnation: int
    presence: Presence
    heard: float
    member_since: float
    until: float
    doublings: int = 0
    lapses: int = 0

    def __post_init__(self) -> None:
        require(self.incarnation >= 0, "incarnation", self.incarnation, "zero or more")
        require(0 <= self.doublings <= MOST_DOUBLINGS, "doublings", self.doublings, f"from 0 to {MOST_DOUBLINGS}")
        require(self.lapses >= 0, "lapses", self.lapses, "zero or more")
        for field in ("heard", "member_since", "until"):
            require(isfinite(getattr(self, field)), field, getattr(self, field), "finite")

    @property
    def is_member(self) -> bool:
        """Whether it belongs to the run, with a connection or, for a while, without."""
        return self.presence in ("present", "away", "expected")

    def deadline(self, patience: float) -> float:
        """When the member is benched if nothing is heard of it before."""
        return self.heard + (return_seconds(patience) if self.presence == "expected" else patience)

    def shifted(self, by: float) -> NodeState:
        """The same on a clock that shows `by` more: the next master's begins elsewhere."""
        return replace(self, heard=self.heard + by, member_since=self.member_since + by, until=self.until + by)

    def restarted(self, now: float) -> NodeState:
        """The same for a new master: a member is expected, a cool-down goes on."""
        return replace(self, presence="expected", heard=now) if self.is_member else self


class OpenRound(NamedTuple):
    """What of the run matters here.

    Attributes:
        number: of the open round, from 1; 0 before the first.
        opened: when it was.
        is_awaited: whether it waits for the node.
        patience: seconds of silence after which a node is benched; every other time is derived from it.
    """

    number: int
    opened: float
    is_awaited: bool
    patience: float


class Transition(Part, frozen=True, kw_only=True):
    """Something to do.

    Attributes:
        kind: admit, resume, replace, take back: send it the current weights, let it contribute from the next round
            on (resume: to the open one too). expect: nothing yet. wait, bench: tell it how long. pass over: the open
            round closes without it. dismiss, release, and replace for the earlier process: close its connection.
        node: name.
        round: that was open.
        reason: in words.
        seconds: from now, of expect, wait and bench.
    """

    kind: TransitionKind
    node: str
    round: int
    reason: str
    seconds: float = 0.0

    def __str__(self) -> str:
        action = _SENTENCES[self.kind].format(node=self.node, seconds=self.seconds)
        return f"round {self.round}: {action}: {self.reason}"


class Decided(NamedTuple):
    """The node's state from now on, None if it is unknown; what to do, in this order; whether the round awaits it."""

    state: NodeState | None
    transitions: tuple[Transition, ...]
    is_awaited: bool
