"""The nodes that the master knows: which connection each has, what it is and does, and its standing (`membership`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from evener.profile import DeviceProfile
from evener.ps import membership
from evener.ps.decision import Decision, Event, Outcome, What
from evener.ps.roster import Roster

_HEARD_APART = 1 / 50
"""Of the patience: being heard more often changes nothing."""


@dataclass
class Member:
    """One node, present or not.

    Attributes:
        name: of the node.
        incarnation: of its process that joined last.
        peer: its connection; None while it has none.
        origin: the address it comes from.
        device: that computes there.
        profile: of the device, once it is measured.
        ready: name of the run for which it has model and data.
        unfit: runs that it cannot take part in.
        reason: of its present standing.
        doing: in words.
        peak_memory_bytes: of its process.
        steps: that it has done since its process started.
    """

    name: str
    incarnation: int
    peer: int | None
    origin: str
    device: str
    profile: DeviceProfile | None = None
    ready: str = ""
    unfit: set[str] = field(default_factory=set)
    reason: str = ""
    doing: str = "waits"
    peak_memory_bytes: int = 0
    steps: int = 0


class Members:
    """All nodes by name and by connection, and the roster.

    Args:
        roster: to begin with.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.by_name: dict[str, Member] = {}
        self._names: dict[int, str] = {}

    @property
    def peers(self) -> list[int]:
        """The connections of all nodes that have one."""
        return list(self._names)

    @property
    def present(self) -> list[Member]:
        """All nodes that are members and have a connection."""
        return [self.by_name[name] for name in self.roster.present]

    @property
    def missing(self) -> set[str]:
        """Names of the members that have no connection and may come back."""
        return {name for name, standing in self.roster.nodes.items() if standing.state in ("away", "expected")}

    def at(self, peer: int) -> Member | None:
        """The node behind a connection, if one has joined over it."""
        name = self._names.get(peer)
        return None if name is None else self.by_name[name]

    def connect(self, member: Member) -> int | None:
        """Know `member` by the connection that it has now; the one that it had before, if it is still there."""
        assert member.peer is not None
        before = self.by_name.get(member.name)
        earlier = None if before is None else before.peer
        if before is not None:
            member.unfit = before.unfit
        if earlier is not None:
            self._names.pop(earlier, None)
        self.by_name[member.name] = member
        self._names[member.peer] = member.name
        return earlier

    def disconnect(self, peer: int) -> Member | None:
        """Forget a connection; the node that had it."""
        name = self._names.pop(peer, None)
        if name is None:
            return None
        member = self.by_name[name]
        member.peer = None
        return member

    def decide(self, what: What, name: str, incarnation: int, now: float) -> tuple[Decision, ...]:
        """What follows from something that happened; see `membership.decide`."""
        return self._follow(membership.decide(self.roster, Event(what=what, node=name, incarnation=incarnation), now))

    def hear(self, member: Member, now: float) -> tuple[Decision, ...]:
        """What follows from having heard of `member`."""
        standing = self.roster.nodes.get(member.name)
        is_usual = standing is not None and (standing.state, standing.incarnation) == ("present", member.incarnation)
        if standing is not None and is_usual and now - standing.heard < _HEARD_APART * self.roster.patience:
            return ()
        return self.decide("heard", member.name, member.incarnation, now)

    def tick(self, now: float) -> tuple[Decision, ...]:
        """What follows from the time alone."""
        wake = self.roster.wake()
        return () if wake is None or now < wake else self._follow(membership.tick(self.roster, now))

    def open_round(self, number: int, now: float) -> None:
        """A round begins, to which everybody present is asked to contribute."""
        self.roster = membership.open_round(self.roster, number, now)

    def is_present(self, name: str) -> bool:
        """Whether the node is a member with a connection."""
        standing = self.roster.nodes.get(name)
        return standing is not None and standing.state == "present"

    def _follow(self, outcome: Outcome) -> tuple[Decision, ...]:
        self.roster = outcome.roster
        for decision in outcome.decisions:
            if decision.node in self.by_name:
                self.by_name[decision.node].reason = decision.reason
        return outcome.decisions
