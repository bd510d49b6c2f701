"""A rank's process on a node, as the supervisor of its run sees it: `membership.rank_supervisor.RankProcess`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.protocol.messages import Header, Send
from evener.ps.protocol.rank_messages import (
    RankEnded,
    RankNode,
    RankPlace,
    RankTold,
    StartRank,
    StopRank,
    encode_rank_part,
)
from evener.records.error_kind import restated
from evener.records.errors import DeviceLost, EvenerError, Interrupted, NodeLost
from evener.wire.frame import Buffer
from evener.wire.identity import host_in


@dataclass(frozen=True)
class RemoteFailure:
    """A failure that a process reported."""

    is_own: bool
    error: EvenerError

    @property
    def sentence(self) -> str:
        """The error's sentence, for the user."""
        return str(self.error)


@dataclass(eq=False)
class RemoteRank:
    """One process.

    Attributes:
        run: name of the run.
        node: name of its node.
        number: number of the process.
        peer: connection over which it was started, or last known to run.
        send: sends a message to the node, if that is connected.
        said: messages to the coordinator that it has not read.
        ended: end that its node reported.
        lost: clause that says why it counts as lost, without a reported end; empty if it does not.
        is_unwanted: whether its node was asked to end it.
    """

    run: str
    node: str
    number: int
    peer: int | None
    send: Callable[[str, Header, Sequence[Buffer]], None]
    said: deque[bytes] = field(default_factory=deque)
    ended: RankEnded | None = None
    lost: str = ""
    is_unwanted: bool = False

    @property
    def has_finished(self) -> bool:
        """Whether it reported that its work is done."""
        return self.ended is not None and self.ended.has_finished

    @property
    def has_ended(self) -> bool:
        """Whether it has ended or counts as lost."""
        return self.ended is not None or bool(self.lost)

    @property
    def is_drained(self) -> bool:
        """Whether all its messages have been read; they arrive before its end."""
        return self.has_ended

    @property
    def failure(self) -> RemoteFailure | None:
        """The failure that it reported; None if it reported none."""
        if self.ended is None or self.ended.kind is None or self.ended.has_finished:
            return None
        return RemoteFailure(self.ended.is_own, self.ended.kind.as_error(self.ended.sentence))

    @property
    def has_failed(self) -> bool:
        """Whether it reported a failure, or ended without a report."""
        return self.failure is not None or (self.has_ended and not self.has_finished)

    @property
    def ending(self) -> str:
        """Clause that says how it ended."""
        return self.ended.ending if self.ended is not None else self.lost

    def tell(self, data: bytes) -> None:
        """Send the process a message of the coordinator, unless it has ended."""
        if not self.has_ended:
            self.send(self.node, RankTold(run=self.run, process=self.number), (data,))

    def request_stop(self, *, at_once: bool) -> None:
        """End it after its step, or at once."""
        if self.ended is None:
            self.send(self.node, StopRank(run=self.run, process=self.number, at_once=at_once), ())


def why_ended(failed: Sequence[RemoteRank], stopping: EvenerError | None, num_ranks: int) -> EvenerError | None:
    """Return the best explanation of a run's end.

    It is an own failure, then a request to stop, a lost device, a death, and last a lost connection. If one node among
    several fails, the error names it, since the user sits at another machine.

    Args:
        failed: ranks with which the run fails.
        stopping: error of the request to stop; None without a request.
        num_ranks: number of ranks of the run.
    """
    failures = [rank.failure for rank in failed if rank.failure is not None]
    own_errors = [
        (rank.node, rank.failure.error)
        for rank in failed
        if rank.failure is not None and rank.failure.is_own and not isinstance(rank.failure.error, Interrupted)
    ]
    if own_errors:
        node, first = own_errors[0]
        is_of_all = num_ranks == 1 or [str(error) for _, error in own_errors].count(str(first)) > 1
        is_named = is_of_all or node in str(first).split()
        return first if is_named else restated(first, f"node {node} failed: {first}")
    if stopping is not None:
        return stopping
    if device_loss := next((one.error for one in failures if isinstance(one.error, DeviceLost)), None):
        return device_loss
    for rank in failed:
        if rank.failure is None:
            return NodeLost(f"node {rank.node} {rank.ending}", (rank.node,))
    return failures[0].error if failures else None


_LOOPBACK = "127.0.0.1"


class RemoteStarter:
    """Starts the processes of one run.

    Args:
        run: name of the run.
        nodes: all nodes.
        send: sends a message to a connection.

    Attributes:
        names: nodes by rank at the start; nodes that join later are appended.
        speeds: 1, or the fraction to which a node is throttled, by its name.
        secret: secret that all processes share.
    """

    def __init__(self, run: str, nodes: Nodes, send: Send) -> None:
        self._run, self._nodes, self._send = run, nodes, send
        self.names: list[str] = []
        self.speeds: dict[str, float] = {}
        self.secret = b""

    def can_start(self, rank: int) -> bool:
        """Return whether the node of this rank is connected and ready."""
        node = self._nodes.record(self.names[rank])
        return node.can_work and node.ready_for == self._run

    def start(self, rank: int, number: int, *, is_late: bool) -> RemoteRank:
        """Start a process of this number on the node of this rank; `is_late` if the run has begun without it."""
        node = self._nodes.record(self.names[rank])
        place = RankPlace(
            rank=0 if is_late else rank,
            nodes=tuple(self._as_rank(name) for name in ([node.name] if is_late else self.names)),
            secret=self.secret,
            patience=self._nodes.patience,
            is_late=is_late,
            leaving=tuple(one for one in self.names if self._nodes.record(one).leaving_until is not None),
        )
        node.doing = f"runs process {number}"
        self._send(node.peer, StartRank(run=self._run, process=number), [encode_rank_part(place)])
        return self.known(node, number)

    def waiting(self) -> list[NodeRecord]:
        """Return the nodes that are ready and have no rank yet."""
        return [node for node in self._nodes.present if node.ready_for == self._run and node.name not in self.names]

    def take_new(self) -> Iterator[str]:
        """Append the waiting nodes as the last ranks, and yield their names."""
        for node in self.waiting():
            self.names.append(node.name)
            yield node.name

    def known(self, node: NodeRecord, number: int) -> RemoteRank:
        """Return the process of this number that was started on a node before."""
        return RemoteRank(self._run, node.name, number, node.peer, self._send_to)

    def _as_rank(self, name: str) -> RankNode:
        node = self._nodes.record(name)
        host = host_in(node.origin) or _LOOPBACK
        return RankNode(name=name, host=host, device=node.device, speed=self.speeds.get(name, 1.0))

    def _send_to(self, name: str, header: Header, buffers: Sequence[Buffer]) -> None:
        self._send(self._nodes.record(name).peer, header, buffers)
