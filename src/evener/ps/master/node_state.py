"""The state of a node in membership, the occurrences that change it, and the transitions that follow, with reasons."""

from __future__ import annotations

from math import isfinite
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from evener.ps.protocol.config import return_seconds
from evener.records.errors import require
from evener.records.schema import Part

MAX_DOUBLINGS = 5
"""Limit of doublings: the longest exclusion is 32 times the first, 320 s, so no node is excluded for good."""
Presence: TypeAlias = Literal["present", "away", "expected", "excluded", "left"]
"""present: a member with a connection. away: a member whose connection broke within the patience. expected: a member
from before the master's restart. excluded: not a member before `until`, and then only when it responds. left: it
has left on purpose.
"""

Occurrence: TypeAlias = Literal["joined", "heard", "contributed", "refused", "late", "disconnected", "goodbye"]
"""joined: asked to take part, over a new connection. heard: any message or heartbeat. contributed: a good update.
refused: an update that cannot be used (not finite, of a wrong shape). late: heard, but the round has waited long
enough. disconnected: the connection over which it joined last is gone. goodbye: has left.
"""

TransitionKind: TypeAlias = Literal[
    "admit", "resume", "replace", "take back", "expect", "wait", "pass over", "exclude", "dismiss", "release"
]  # fmt: skip

NodeEvent: TypeAlias = Literal[
    "joined", "back", "replaced", "away", "waits", "skipped", "excluded", "dismissed", "left", "expelled"
]  # fmt: skip
"""Kinds of events of nodes, as a record names them."""

_SENTENCES: dict[TransitionKind, str] = {
    "admit": "admit node {node}",
    "resume": "continue with node {node}",
    "replace": "replace node {node}",
    "take back": "readmit node {node}",
    "expect": "expect node {node} back within {seconds:.3g} s",
    "wait": "let node {node} wait for {seconds:.3g} s",
    "pass over": "close without node {node}",
    "exclude": "exclude node {node} for {seconds:.3g} s",
    "dismiss": "dismiss node {node}",
    "release": "let node {node} go",
}


class NodeState(Part, frozen=True, kw_only=True):
    """State of one node at the master.

    Attributes:
        incarnation: incarnation of its process, which is higher for one that is started later.
        presence: see `Presence`.
        heard: time of its last message; while it is expected, time of the master's restart.
        member_since: time when it was last admitted.
        until: excluded, or left while excluded: end of the exclusion; away: end of the open round's wait for it.
        doublings: doublings of its next exclusion.
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
        require(0 <= self.doublings <= MAX_DOUBLINGS, "doublings", self.doublings, f"from 0 to {MAX_DOUBLINGS}")
        require(self.lapses >= 0, "lapses", self.lapses, "zero or more")
        for field in ("heard", "member_since", "until"):
            require(isfinite(getattr(self, field)), field, getattr(self, field), "finite")

    @property
    def is_member(self) -> bool:
        """Whether it belongs to the run, with a connection or, for a while, without."""
        return self.presence in ("present", "away", "expected")

    def deadline(self, patience: float) -> float:
        """Return the time at which the member is excluded if it does not respond before."""
        return self.heard + (return_seconds(patience) if self.presence == "expected" else patience)

    def shifted(self, by: float) -> NodeState:
        """Return the state on a clock that is `by` ahead, since the next master's clock starts elsewhere."""
        return replace(self, heard=self.heard + by, member_since=self.member_since + by, until=self.until + by)

    def restarted(self, now: float) -> NodeState:
        """Return the state for a restarted master: a member is expected, and an exclusion continues."""
        return replace(self, presence="expected", heard=now) if self.is_member else self


class OpenRound(NamedTuple):
    """The open round of a run.

    Attributes:
        number: number of the round, from 1; 0 before the first.
        opened: time when it was opened.
        is_awaited: whether it waits for the node.
        patience: seconds of silence after which a node is excluded; every other time is derived from it.
    """

    number: int
    opened: float
    is_awaited: bool
    patience: float


class Transition(Part, frozen=True, kw_only=True):
    """A decision to carry out.

    Attributes:
        kind: admit, resume, replace, take back: send it the current weights; it contributes from the next round on
            (resume: to the open one, too). expect: nothing yet. wait, exclude: tell it how long. pass over: the open
            round closes without it. dismiss, release, and replace for the earlier process: close its connection.
        node: name of the node.
        round: number of the open round.
        reason: a clause.
        seconds: duration of expect, wait and exclude.
    """

    kind: TransitionKind
    node: str
    round: int
    reason: str
    seconds: float = 0.0

    def __str__(self) -> str:
        action = _SENTENCES[self.kind].format(node=self.node, seconds=self.seconds)
        return f"round {self.round}: {action}: {self.reason}"


class Decision(NamedTuple):
    """A decision: the node's new state (None if unknown), transitions in order, and whether the round awaits it."""

    state: NodeState | None
    transitions: tuple[Transition, ...]
    is_awaited: bool
