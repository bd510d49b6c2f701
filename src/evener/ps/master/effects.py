"""What follows from what happens to nodes: the one place where a node is taken into the run, or lost from it.

something happened -> membership decides (`nodes`) -> told, noted in the history, and done: work given or taken away,
                      connections closed
"""

from __future__ import annotations

from collections.abc import Iterable

from evener.ps.master.access.invitations import Invitations
from evener.ps.master.access.members import Members
from evener.ps.master.node_state import Occurrence, Transition, TransitionKind
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.scheduler import Scheduler
from evener.ps.master.training_run import TrainingRun
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import Dismiss, Header, Quarantine, Welcome
from evener.records.schema import shown
from evener.wire.server import Server

EVENTS: dict[TransitionKind, str] = {
    "admit": "joined",
    "resume": "back",
    "take back": "back",
    "replace": "replaced",
    "expect": "away",
    "wait": "waits",
    "pass over": "passed over",
    "exclude": "excluded",
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
        self.members, self.audit = Members(config.home.members), scheduler.audit
        self.invitations = Invitations(config.home.invitations, config.identity, self.members, server.tokens)

    def of(self, what: Occurrence, node: NodeRecord) -> None:
        """Something happened to a node."""
        self.follow(self._nodes.decide(what, node, self._clock()))

    def of_hearing(self, node: NodeRecord) -> None:
        """Something was heard of a node."""
        if transitions := self._nodes.heard(node, self._clock()):
            self.follow(transitions)

    def of_runs(self) -> None:
        """Runs may have learnt something of nodes; then their next rounds may be open."""
        for run in self._scheduler.trainings:  # called for every contribution
            try:
                self._of(run)
            except Exception as error:  # the other runs, and the nodes, go on
                self._scheduler.set_aside(self._scheduler.active(run.job.run), error)

    def _of(self, run: TrainingRun) -> None:
        observations = run.observations
        while observations:
            what, node = observations.popleft()
            if what != "contributed" or not self._nodes.is_well(node):
                self.of(what, node)
        while run.liars:
            self.expel(*run.liars.pop())
        self._nodes.open_round(run.job.run, run.server.version + 1, self._clock())

    def of_time(self) -> None:
        """Time has passed."""
        self.follow(self._nodes.tick(self._clock()))

    def follow(self, transitions: Iterable[Transition]) -> None:
        """Do what was decided."""
        for transition in transitions:
            self._notify(str(transition))
            node = self._nodes.by_name[transition.node]
            is_lost = _is_lost(transition, node)
            self._scheduler.follow(EVENTS[transition.kind], transition.reason, node, is_lost=is_lost)
            self._do(transition, node)

    def expel(self, node: NodeRecord, reason: str) -> None:
        """Have a node go for good, and whoever shares its key; the record of the run in progress says why."""
        for name in (node.name, *self.members.others_with_key_of(node.name)):
            if (one := self._nodes.by_name.get(name)) is not None and (one is node or one.peer is not None):
                self._expel(one, reason)

    def _expel(self, node: NodeRecord, reason: str) -> None:
        self.members.expel(node.name, reason)
        self._notify(f"node {node.name} is expelled: {reason}")
        self.audit.write("expelled", name=node.name, address=node.origin, detail=reason)
        self._scheduler.follow("expelled", reason, node, is_lost=True)
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

    def _do(self, transition: Transition, node: NodeRecord) -> None:
        kind = transition.kind
        if kind in ("admit", "resume", "replace", "take back"):
            self._scheduler.admit(node)
        elif kind in ("exclude", "wait"):
            self._server.send(node.peer, Quarantine(seconds=transition.seconds, reason=transition.reason))
        elif kind == "dismiss" and node.peer is not None:
            self.turn_away(node.peer, transition.reason)


def _is_lost(transition: Transition, node: NodeRecord) -> bool:
    """Whether a run has to go on without the node."""
    is_gone = transition.kind == "pass over" and not node.is_present  # else its update was bad, no more
    return is_gone or transition.kind in ("replace", "exclude", "wait", "release")
