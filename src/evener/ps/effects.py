"""What follows from what happens to nodes: the one place where a node is taken into the run, or lost from it.

something happened -> membership decides (`nodes`) -> told, noted in the history, and done: work given or taken away,
                      connections closed
"""

from __future__ import annotations

from collections.abc import Iterable

from evener.ps.audit import AuditLog
from evener.ps.config import MasterConfig
from evener.ps.invitations import Invitations
from evener.ps.members import Members
from evener.ps.messages import Dismiss, Header, Quarantine, Welcome
from evener.ps.node_state import Occurrence, Transition, TransitionKind
from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.scheduler import Scheduler
from evener.schema import shown
from evener.wire.server import Server

EVENTS: dict[TransitionKind, str] = {
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
"""What each transition is called in a record."""


class Effects:
    """See the first line.

    Args:
        nodes: whose state is decided upon.
        scheduler: of the run in progress.
        server: of the connections.
        config: of the master.

    Attributes:
        members: whose name is whose, and who was expelled.
        audit: where is written who did what.
        invitations: by which nodes and submitters come.
    """

    def __init__(self, nodes: Nodes, scheduler: Scheduler, server: Server[Header], config: MasterConfig) -> None:
        self._nodes, self._scheduler, self._server = nodes, scheduler, server
        self._clock, self._notify = config.clock, config.notify
        self.members, self.audit = Members(config.home.members), AuditLog(config.home.audit, config.notify)
        self.invitations = Invitations(config.home.invitations, config.identity, self.members, server.tokens)

    def of(self, what: Occurrence, node: NodeRecord) -> None:
        """Something happened to a node."""
        self.follow(self._nodes.decide(what, node, self._clock()))

    def of_hearing(self, node: NodeRecord) -> None:
        """Something was heard of a node."""
        if transitions := self._nodes.heard(node, self._clock()):
            self.follow(transitions)

    def of_run(self) -> None:
        """The run may have learnt something of nodes; then its next round may be open."""
        if (run := self._scheduler.run) is None:
            return
        observations = run.observations
        while observations:
            what, node = observations.popleft()
            if what != "contributed" or not self._nodes.is_well(node):
                self.of(what, node)
        while run.liars:
            self.expel(*run.liars.pop())
        if (number := run.server.version + 1) != self._nodes.round:
            self._nodes.open_round(number, self._clock())

    def of_not_ready(self, node: NodeRecord, reason: str) -> None:
        """A node cannot take part in the run."""
        run = self._scheduler.run
        assert run is not None
        run.not_ready(node, reason)
        run.lose(node)

    def of_time(self) -> None:
        """Time has passed."""
        self.follow(self._nodes.tick(self._clock()))

    def follow(self, transitions: Iterable[Transition]) -> None:
        """Do what was decided."""
        for transition in transitions:
            self._notify(str(transition))
            if self._scheduler.run is not None:
                reason = f"node {transition.node}: {transition.reason}"
                self._scheduler.run.note(EVENTS[transition.kind], reason, transition.node)
            self._do(transition)

    def expel(self, node: NodeRecord, reason: str) -> None:
        """Have a node go for good; the record of the run in progress says why."""
        self.members.expel(node.name, reason)
        self._notify(f"node {node.name} is expelled: {reason}")
        self.audit.write("expelled", name=node.name, address=node.origin, detail=reason)
        if (run := self._scheduler.run) is not None:
            run.note("expelled", f"node {node.name}: {reason}", node.name)
            run.lose(node)
        if node.peer is not None:
            self.turn_away(node.peer, f"it was expelled: {reason}")
        self.of("goodbye", node)

    def welcome(self, peer: int, welcome: Welcome) -> None:
        """Tell a node that it is in."""
        self._server.send(peer, welcome)

    def turn_away(self, peer: int, reason: str) -> None:
        """Close the connection of a node that may not take part."""
        self._server.send(peer, Dismiss(reason=shown(reason), is_error=True))
        self._server.disconnect(peer, reason)

    def _do(self, transition: Transition) -> None:
        kind, run, node = transition.kind, self._scheduler.run, self._nodes.by_name[transition.node]
        is_gone = kind == "pass over" and not node.is_present  # else its update was bad, no more
        if run is not None and (is_gone or kind in ("replace", "bench", "wait", "release")):
            run.lose(node)
        if kind in ("admit", "resume", "replace", "take back"):
            self._scheduler.admit(node)
        elif kind in ("bench", "wait"):
            self._server.send(node.peer, Quarantine(seconds=transition.seconds, reason=transition.reason))
        elif kind == "dismiss" and node.peer is not None:
            self.turn_away(node.peer, transition.reason)
