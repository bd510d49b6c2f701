"""Effects of what happens to nodes: carries out what `node_rules` decides about members of the master.

Whether a node may join at all is in `joining.py`.

When a node is lost, `Effects.follow` calls `Scheduler.follow`, which calls `ActiveLeaseRun.follow`, where its samples
are assigned again (`LeaseTraining.reassign`), or `ActiveRankRun.follow`, where its rank is lost (`RankTraining.lose`).
A rank can also be lost without its node: its process ends (`RankTraining.ended`), or the node is disconnected for
longer than its rank may be silent (`ranks/rank_table.py: Absences`).

an occurrence -> `node_rules` decides (by `nodes`) -> the decision is logged, added to the history, and carried out:
                 work is assigned or withdrawn, connections are closed
"""

from __future__ import annotations

from collections.abc import Iterable

from evener.ps.master.access.invitations import Invitations
from evener.ps.master.access.members import Members
from evener.ps.master.lease_training import LeaseTraining
from evener.ps.master.node_state import NodeEvent, Occurrence, Transition, TransitionKind
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import Dismiss, GiveNotice, Header, Quarantine, Welcome
from evener.records.schema import measured, shown
from evener.wire.server import Server

EVENTS: dict[TransitionKind, NodeEvent] = {
    "admit": "joined",
    "resume": "back",
    "take back": "back",
    "replace": "replaced",
    "expect": "away",
    "wait": "waits",
    "pass over": "skipped",
    "exclude": "excluded",
    "dismiss": "dismissed",
    "release": "left",
}
"""The event that a record has of each transition."""


class Effects:
    """Carries out the decisions of membership.

    Args:
        nodes: all nodes, with their states.
        scheduler: runs of the master.
        server: server of the connections.
        config: configuration of the master.

    Attributes:
        members: owners of the nodes' names, and expelled nodes.
        audit: audit log.
        invitations: invitations of nodes and submitters.
    """

    def __init__(self, nodes: Nodes, scheduler: Scheduler, server: Server[Header], config: MasterConfig) -> None:
        self._nodes, self._scheduler, self._server = nodes, scheduler, server
        self._clock, self._notify = config.clock, config.notify
        self.members, self.audit = Members(config.home.members, self._is_known, config.clock), scheduler.audit
        self.invitations = Invitations(config.home.invitations, config.identity, self.members, server.tokens)

    def of(self, what: Occurrence, node: NodeRecord) -> None:
        """Follow an occurrence of a node."""
        self.follow(self._nodes.decide(what, node, self._clock()))

    def notice(self, node: NodeRecord, seconds: float, reason: str) -> None:
        """Let a node go once it has finished what it works on, or after `seconds`; it gets nothing new."""
        until = self._clock() + seconds
        if node.leaving_until is not None:
            node.leaving_until = min(node.leaving_until, until)
            return
        node.leaving_until, node.doing = until, "finishes its work, and leaves"
        self._notify(f"node {node.name} is about to leave: {reason}")
        self._scheduler.retire(node)

    def release(self, node: NodeRecord, seconds: float, reason: str) -> None:
        """Let a connected node go, as if it had given notice; it repeats its notice to the next master."""
        self._server.send(node.peer, GiveNotice(seconds=measured(seconds + self._nodes.patience), reason=reason))
        self.notice(node, seconds, reason)

    def _dismiss_leaving(self) -> None:
        """Dismiss the nodes that leave and have finished, or had enough time."""
        now = self._clock()
        for node in self._nodes.leaving:
            assert node.leaving_until is not None
            is_late = now >= node.leaving_until
            if not node.has_left and (is_late or self._scheduler.is_free(node)):
                reason = "it left on notice" if not is_late else "its time to finish its work is over"
                self._server.send(node.peer, Dismiss(reason=reason, is_error=False))
                self.of("goodbye", node)
                node.leaving_until = now + self._nodes.patience
            elif node.has_left and is_late and node.peer is not None:
                self.turn_away(node.peer, "it has left")

    def of_hearing(self, node: NodeRecord) -> None:
        """Note a sign of life of a node."""
        if node.leaving_until is not None and node.has_left:
            return  # it is about to end
        if transitions := self._nodes.heard(node, self._clock()):
            self.follow(transitions)

    def of_runs(self) -> None:
        """Follow the observations of runs about nodes, after which their next rounds may be open."""
        for run in self._scheduler.trainings:  # called for every contribution
            try:
                self._of(run)
            except Exception as error:  # the other runs, and the nodes, continue
                self._scheduler.training_failed(run, error)

    def _of(self, run: LeaseTraining) -> None:
        observations = run.observations
        while observations:
            what, node = observations.popleft()
            if what != "contributed" or not self._nodes.is_well(node):
                self.of(what, node)
        while run.faulty:
            self.expel(*run.faulty.pop())
        self._nodes.open_round(run.job.run, run.server.version + 1, self._clock())

    def of_time(self) -> None:
        """Follow what is due."""
        self._dismiss_leaving()
        self.follow(self._nodes.tick(self._clock()))

    def follow(self, transitions: Iterable[Transition]) -> None:
        """Carry out decisions."""
        for transition in transitions:
            self._notify(str(transition))
            node = self._nodes.by_name[transition.node]
            is_lost = _is_lost(transition, node)
            self._scheduler.follow(EVENTS[transition.kind], transition.reason, node, is_lost=is_lost)
            self._do(transition, node)

    def expel(self, node: NodeRecord, reason: str) -> None:
        """Expel a node, and all nodes that share its key; the record of the run in progress says why."""
        for name in (node.name, *self.members.others_with_key_of(node.name)):
            if (one := self._nodes.by_name.get(name)) is not None and (one is node or one.peer is not None):
                self._expel(one, reason)

    def _is_known(self, name: str) -> bool:
        """Return whether a node takes part, may come back by itself, or is excluded for a while."""
        node = self._nodes.by_name.get(name)
        return node is not None and not node.is_forgettable(self._clock())

    def _expel(self, node: NodeRecord, reason: str) -> None:
        try:
            self.members.expel(node.name, reason)
        except OSError as error:  # it is expelled, and the file is written later
            self._notify(f"warning: {error.filename} cannot be written: {error.strerror}")
        self._notify(f"node {node.name} is expelled: {reason}")
        self.audit.write("expelled", name=node.name, address=node.origin, detail=reason)
        self._scheduler.follow("expelled", reason, node, is_lost=True)
        if node.peer is not None:
            self.turn_away(node.peer, f"it was expelled: {reason}")
        self.of("goodbye", node)

    def welcome(self, peer: int, welcome: Welcome) -> None:
        """Tell a node that it has joined."""
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
    """Return whether a run has to continue without the node."""
    is_gone = transition.kind == "pass over" and not node.is_present  # else only its update was bad
    return is_gone or transition.kind in ("replace", "exclude", "wait", "release")
