"""What the master does about what membership decides: tell, note, give work, take it away, close connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evener.ps import messages as say
from evener.ps.decision import Decision, Verdict, What
from evener.ps.employer import Employer
from evener.ps.members import Member, Members
from evener.ps.messages import Header
from evener.wire.server import Server

EVENTS: dict[Verdict, str] = {
    "admit": "joined",
    "resume": "back",
    "take back": "back",
    "replace": "replaced",
    "expect": "away",
    "wait": "waits",
    "pass over": "passed over",
    "bench": "benched",
    "dismiss": "dismissed",
    "release": "left",
}
"""What each decision is called in a record."""


class Consequences:
    """See the first line.

    Args:
        hub: of all connections.
        members: whose standing is decided upon.
        employer: of those who may work.
        clock: seconds.
        tell: tells the master's user.
    """

    def __init__(
        self,
        hub: Server[Header],
        members: Members,
        employer: Employer,
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self._hub, self._members, self._employer = hub, members, employer
        self._clock, self._tell = clock, tell

    def of(self, what: What, member: Member) -> None:
        """Something happened to a node: have it decided upon, and do what follows."""
        self.follow(self._members.decide(what, member.name, member.incarnation, self._clock()))

    def of_hearing(self, member: Member) -> None:
        """Something was heard of a node."""
        self.follow(self._members.hear(member, self._clock()))

    def of_work(self) -> None:
        """The run may have learnt something of nodes; then its next round may be open."""
        run = self._employer.run
        if run is None:
            return
        while run.happenings:
            what, name = run.happenings.popleft()
            self.of(what, self._members.by_name[name])
        if run.server.version + 1 != self._members.roster.round:
            self._members.open_round(run.server.version + 1, self._clock())

    def follow(self, decisions: Iterable[Decision]) -> None:
        """Do what was decided."""
        for decision in decisions:
            self._tell(str(decision))
            if self._employer.run is not None:
                self._employer.run.note(EVENTS[decision.verdict], f"node {decision.node}: {decision.reason}")
            self._do(decision)

    def turn_away(self, peer: int, reason: str) -> None:
        """Close the connection of a node that may not take part."""
        self._hub.send(peer, say.Dismiss(reason=reason, is_error=True))
        self._hub.disconnect(peer, reason)

    def _do(self, decision: Decision) -> None:
        name, verdict = decision.node, decision.verdict
        is_gone = verdict == "pass over" and not self._members.is_present(name)  # else its update was bad, no more
        if is_gone or verdict in ("replace", "bench", "wait", "release"):
            self._employer.lose(name)
        if verdict in ("admit", "resume", "replace", "take back"):
            self._employer.take_in(name)
        elif verdict in ("bench", "wait"):
            self._employer.send(name, say.Quarantine(seconds=decision.seconds, reason=decision.reason))
        elif verdict == "dismiss":
            member = self._members.by_name.get(name)
            if member is not None and member.peer is not None:
                self.turn_away(member.peer, decision.reason)
