"""What the master knows of its nodes: who is there, who is benched and until when, whom the open round waits for."""

from __future__ import annotations

from math import isfinite
from typing import Literal, TypeAlias

from msgspec.structs import replace

from evener.errors import require
from evener.schema import Part

FIRST_COOL_DOWN = 2 / 3
"""In patiences: 10 s of 15 s."""

MOST_DOUBLINGS = 5
"""The longest cool-down is 32 times the first, 320 s: no node is shut out for good."""

FORGIVEN_AFTER = 10
"""Patiences of unbroken membership that take one doubling back. Losing a node can cost the others one patience: who is
lost more often than once in ten stays away for longer each time."""

RETURN = 2
"""Patiences that members have to come back to a restarted master: one to notice that it is gone, one to connect."""

State: TypeAlias = Literal["present", "away", "expected", "benched", "left"]
"""present: a member with a connection. away: a member whose connection broke within the patience. expected: a member of
the time before the master restarted. benched: not a member before `until`, and then only when it is heard. left: said
goodbye. A node that is not in the roster is unknown."""


class Standing(Part, frozen=True, kw_only=True):
    """How one node stands with the master; times are those of the master's clock.

    Attributes:
        incarnation: of its process; one that was started later has a higher number.
        state: see `State`.
        heard: when it was last heard; while it is expected, when the master restarted.
        member_since: when it was taken in, or back.
        until: benched, or left while benched: end of the cool-down; away: how long the open round waits for it.
        doublings: of its next cool-down.
        lapses: updates refused and processes restarted since its last good update.
    """

    incarnation: int
    state: State
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
        return self.state in ("present", "away", "expected")


class Roster(Part, frozen=True, kw_only=True):
    """All nodes that ever joined; a value, which only `membership` advances.

    Attributes:
        patience: seconds of silence after which a node is benched; every other time is derived from it.
        round: number of the open one, from 1; 0 before the first.
        opened: when it was.
        awaited: members that were asked to contribute to it and have not yet; the round closes when none is left.
        nodes: standing by name.
    """

    patience: float = 15.0
    round: int = 0
    opened: float = 0.0
    awaited: frozenset[str] = frozenset()
    nodes: dict[str, Standing] = {}

    def __post_init__(self) -> None:
        require(self.patience > 0 and isfinite(self.patience), "patience", self.patience, "positive and finite")
        require(self.round >= 0, "round", self.round, "zero or more")
        require(isfinite(self.opened), "opened", self.opened, "finite")
        require(self.nodes.keys() >= self.awaited, "awaited", sorted(self.awaited), "names of nodes")

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the members that can be asked to contribute, sorted."""
        return tuple(sorted(name for name, node in self.nodes.items() if node.state == "present"))

    def deadline(self, name: str) -> float:
        """When the member is benched if nothing is heard of it before."""
        node = self.nodes[name]
        return node.heard + self.patience * (RETURN if node.state == "expected" else 1)

    def wake(self) -> float | None:
        """When `membership.tick` has something to decide, if nothing happens before; None if never."""
        members = [name for name, node in self.nodes.items() if node.is_member]
        held_up = [self.nodes[name].until for name in self.awaited if self.nodes[name].state == "away"]
        return min([*map(self.deadline, members), *held_up], default=None)

    def snapshot(self, now: float) -> Roster:
        """The roster with times counted from `now`, to be written down: the next master's clock begins elsewhere."""
        return self._shifted(-now)

    def restarted(self, now: float) -> Roster:
        """The roster of a new master, from a `snapshot`: members are expected, cool-downs go on, no round is open."""
        before = replace(self, awaited=frozenset())._shifted(now)
        nodes = {
            name: replace(node, state="expected", heard=now) if node.is_member else node
            for name, node in before.nodes.items()
        }
        return replace(before, nodes=nodes)

    def _shifted(self, by: float) -> Roster:
        nodes = {
            name: replace(
                node, heard=node.heard + by, member_since=node.member_since + by, until=node.until + by
            )
            for name, node in self.nodes.items()
        }  # fmt: skip
        return replace(self, nodes=nodes, opened=self.opened + by)
