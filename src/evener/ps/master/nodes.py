"""The nodes that the master knows: one record per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from evener.agreements.worker_record import WorkerRecord
from evener.ps.master import node_rules
from evener.ps.master.access.quotas import MAX_NAMES
from evener.ps.master.node_state import Decision, NodeState, Occurrence, OpenRound, Transition
from evener.ps.protocol.status import NodeStatus
from evener.records.errors import DoesNotFit, EvenerError, InvalidInput, NoUsableNode
from evener.records.history import NodeWork
from evener.records.profile import DeviceProfile
from evener.records.schema import shown

MEASURING_S, MEASURING_PATIENCES = 300.0, 8.0
"""Longest time that a run waits for a node to measure its device: the larger of these seconds and patiences."""
_HEARD_APART = 1 / 50
"""Share of the patience within which another sign of life changes nothing."""


@dataclass(slots=True, eq=False)
class NodeRecord:
    """A node, connected or not.

    Attributes:
        name: name of the node.
        state: its state as a member (`node_state`, by the rules of `node_rules`); None until it has joined.
        peer: its connection; None while it has none.
        origin: address that it connects from.
        device: device that computes.
        profile: profile of the device, once it is measured.
        joined_at: time of its last join.
        leaving_until: time after which it is dismissed in any case; None unless it leaves on notice.
        ready_for: name of the run for which it has model and data.
        left_out_of: runs that it cannot take part in.
        reason: reason of its present state.
        doing: activity, a clause.
        error: the error for which it was last left out of a run; None if none was raised.
        peak_memory_bytes: peak memory of its process.
        steps: steps that it has done since its process started.
        steps_left: steps of its work whose heartbeats still count as progress.
        progress_at: time of its last sign of progress.
        worker: its leases, speed and counts in the run in progress; None if it has had no part in it.
    """

    name: str
    state: NodeState | None = None
    peer: int | None = None
    origin: str = ""
    device: str = ""
    profile: DeviceProfile | None = None
    joined_at: float = inf
    leaving_until: float | None = None
    ready_for: str = ""
    left_out_of: set[str] = field(default_factory=set)
    reason: str = ""
    doing: str = "waits"
    error: EvenerError | None = None
    peak_memory_bytes: int = 0
    steps: int = 0
    steps_left: int = 0
    progress_at: float = 0.0
    worker: WorkerRecord | None = None

    def leave_out(self, run: str, reason: str, error: EvenerError | None = None) -> None:
        """Note that it cannot take part in a run, because of `error` if one was raised there."""
        self.left_out_of.add(run)
        self.error = error
        self.ready_for, self.doing = "", shown(f"cannot take part: {reason}")

    @property
    def is_present(self) -> bool:
        """Whether it is a member with a connection."""
        return self.state is not None and self.state.presence == "present"

    @property
    def has_left(self) -> bool:
        """Whether it has left on purpose, or never joined."""
        return self.state is None or self.state.presence == "left"

    @property
    def can_work(self) -> bool:
        """Whether it is present, and not about to leave."""
        return self.is_present and self.leaving_until is None

    def is_overdue(self, now: float, patience: float) -> bool:
        """Return whether it has not measured its device in time, so that runs do not wait for it."""
        return self.profile is None and now - self.joined_at > max(MEASURING_S, MEASURING_PATIENCES * patience)

    def is_forgettable(self, now: float) -> bool:
        """Return whether the record can be removed: the node takes part in nothing, and has no exclusion."""
        is_gone = self.state is None or (not self.state.is_member and self.state.until <= now)
        return is_gone and self.peer is None and self.worker is None


class Nodes:
    """All nodes, by name and by connection.

    Args:
        patience: seconds of silence after which a node is excluded.

    Attributes:
        by_name: records by name, with nodes that are only remembered.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.by_name: dict[str, NodeRecord] = {}
        self._rounds: dict[str, tuple[int, float]] = {}
        self._by_peer: dict[int, NodeRecord] = {}

    @property
    def peers(self) -> list[int]:
        """Connections of all nodes that have one."""
        return list(self._by_peer)

    @property
    def present(self) -> list[NodeRecord]:
        """All nodes that are members, have a connection and are not about to leave, by name."""
        return [self.by_name[name] for name in sorted(self.by_name) if self.by_name[name].can_work]

    @property
    def leaving(self) -> list[NodeRecord]:
        """Nodes with a connection that leave on notice, or have left."""
        return [record for record in self._by_peer.values() if record.leaving_until is not None]

    @property
    def missing(self) -> set[str]:
        """Names of the members that have no connection and may reconnect."""
        return {
            name
            for name, record in self.by_name.items()
            if record.state is not None and record.state.presence in ("away", "expected")
        }

    def at(self, peer: int) -> NodeRecord | None:
        """Return the node of a connection, if one has joined over it."""
        return self._by_peer.get(peer)

    def record(self, name: str) -> NodeRecord:
        """Return the record of a node; make it if there is none."""
        record = self.by_name.get(name)
        if record is None:
            record = self.by_name[name] = NodeRecord(name)
        return record

    def has_room(self, name: str, now: float) -> bool:
        """Return whether a node of this name can be added; remove forgettable nodes if that is needed."""
        if name in self.by_name or len(self.by_name) < MAX_NAMES:
            return True
        gone = [one.name for one in self.by_name.values() if one.is_forgettable(now)]
        for one in gone:
            del self.by_name[one]
        return bool(gone)

    def connect(self, record: NodeRecord, peer: int) -> int | None:
        """Set a node's connection; return the earlier one, if it still exists."""
        earlier, record.peer = record.peer, peer
        if earlier is not None:
            self._by_peer.pop(earlier, None)
        self._by_peer[peer] = record
        return earlier

    def disconnect(self, peer: int) -> NodeRecord | None:
        """Remove a connection; return its node."""
        record = self._by_peer.pop(peer, None)
        if record is not None:
            record.peer = None
        return record

    def open_round(self, run: str, number: int, now: float) -> None:
        """Note the open round of a run, and when it was opened."""
        if self._rounds.get(run, (0, 0.0))[0] != number:
            self._rounds[run] = number, now

    def forget_rounds(self, run: str) -> None:
        """Forget the rounds of a run that is over."""
        self._rounds.pop(run, None)

    def decide(
        self, what: Occurrence, record: NodeRecord, now: float, incarnation: int | None = None
    ) -> tuple[Transition, ...]:
        """Decide on an occurrence of a node, or of its process with this `incarnation`."""
        if incarnation is None:
            incarnation = 0 if record.state is None else record.state.incarnation
        # A refused update was awaited until just now.
        round = self._round_of(record, what == "refused" or self._is_awaited(record))
        return self._follow(record, node_rules.decide(record.name, record.state, what, incarnation, now, round))

    def heard(self, record: NodeRecord, now: float) -> tuple[Transition, ...]:
        """Decide on a sign of life of a node."""
        state = record.state
        if state is not None and state.presence == "present" and now - state.heard < _HEARD_APART * self.patience:
            return ()
        return self.decide("heard", record, now)

    def is_well(self, record: NodeRecord) -> bool:
        """Return whether another good update of a node that has just responded changes nothing."""
        state = record.state
        return state is not None and state.presence == "present" and not state.lapses

    def tick(self, now: float) -> tuple[Transition, ...]:
        """Decide on the passing of time."""
        transitions: tuple[Transition, ...] = ()
        for name in sorted(self.by_name):
            record = self.by_name[name]
            if record.state is not None and record.state.is_member:
                round = self._round_of(record, self._is_awaited(record))
                transitions += self._follow(record, node_rules.tick(name, record.state, now, round))
        return transitions

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count the last `seconds` as silence of the members, since the master itself did not listen."""
        for record in self.by_name.values():
            if record.state is not None and record.state.is_member:
                record.state = replace(record.state, heard=min(now, record.state.heard + seconds))

    def snapshot(self, now: float) -> dict[str, NodeState]:
        """Return all states with times relative to `now`, to be saved."""
        return {one.name: one.state.shifted(-now) for one in self.by_name.values() if one.state is not None}

    def resume(self, states: Mapping[str, NodeState], now: float) -> None:
        """Restore the nodes of a master that was killed: members are expected to reconnect."""
        for name, state in states.items():
            self.record(name).state = state.shifted(now).restarted(now)

    def status(self, totals: Mapping[str, NodeWork], now: float) -> tuple[NodeStatus, ...]:
        """Return the state of all nodes by name; `totals` is the work of each in the run in progress."""
        statuses = []
        for name in sorted(self.by_name):
            record, work = self.by_name[name], totals.get(name, NodeWork())
            if (state := record.state) is None:
                continue
            member_until = state.deadline(self.patience)
            until = {"excluded": state.until, "away": member_until, "expected": member_until}.get(state.presence)
            status = NodeStatus(
                name=name,
                address=record.origin if record.peer is not None else "",
                device=record.device,
                score=_score(record.profile),
                state=state.presence,
                reason=record.reason,
                seconds=None if until is None else max(0.0, until - now),
                doing=record.doing if record.is_present else "",
                samples=work.samples,
                samples_per_second=work.samples / work.compute_seconds if work.compute_seconds else 0.0,
                bytes_sent=work.sent,
                bytes_received=work.received,
            )
            statuses.append(status)
        return tuple(statuses)

    def _round_of(self, record: NodeRecord, is_awaited: bool) -> OpenRound:
        """Return the open round of the run for which a node is ready, or else the one that was opened last."""
        latest = max(self._rounds.values(), key=lambda round: round[1], default=(0, 0.0))
        number, opened = self._rounds.get(record.ready_for, latest)
        return OpenRound(number, opened, is_awaited, self.patience)

    def _is_awaited(self, record: NodeRecord) -> bool:
        return record.worker is not None and bool(record.worker.leases)

    def _follow(self, record: NodeRecord, decision: Decision) -> tuple[Transition, ...]:
        record.state = decision.state
        for transition in decision.transitions:
            record.reason = transition.reason
        return decision.transitions


def _score(profile: DeviceProfile | None) -> float | None:
    flops = [one.matmul_flops for one in profile.throughputs if one.precision == "fp32"] if profile else []
    return flops[0] / 1e9 if flops and flops[0] else None


def no_usable_node(
    nodes: Sequence[NodeRecord], run: str, now: float, patience: float
) -> NoUsableNode | InvalidInput | DoesNotFit:
    """Return the error of a run in which none of these nodes can take part; if several raise the same, that one.

    If all of them ran out of memory, it is DoesNotFit.
    """
    errors = [node.error for node in nodes if run in node.left_out_of and node.error is not None]
    if errors and len(errors) == len(nodes) and all(isinstance(error, DoesNotFit) for error in errors):
        return DoesNotFit(f"no node can take part in the run: {'; '.join(map(str, errors))}")
    if len(errors) == len(nodes) > 1 and len({(type(error), str(error)) for error in errors}) == 1:
        if isinstance(errors[0], InvalidInput):
            return errors[0]
        return NoUsableNode(f"no node can take part in the run: {errors[0]}")
    slow = "has not measured its device in time"
    reasons = (f"node {node.name} {slow if node.is_overdue(now, patience) else node.doing}" for node in nodes)
    return NoUsableNode(f"no node can take part in the run: {'; '.join(reasons)}")


def stragglers(step_seconds: Mapping[NodeRecord, float], patience: float, now: float) -> list[NodeRecord]:
    """Return the nodes for which the others wait: their last sign of progress is more than the patience ago.

    Work may take much longer than the patience: an epoch of local steps, a large batch, weights over a slow link. So
    the time since the last sign counts: bytes sent or received, a step done, work taken or finished. A step itself
    gives no signs, so its predicted time is added to the patience.

    Args:
        step_seconds: predicted seconds of one step, by node at work.
        patience: seconds.
        now: seconds.
    """
    return [node for node, seconds in step_seconds.items() if now - node.progress_at > patience + seconds]
