"""A rank's process on a node, as the authority of its run sees it: `elastic.elastic_ranks.RankProcess`."""

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
from evener.records.errors import EvenerError, Interrupted, NodeLost
from evener.wire.frame import Buffer
from evener.wire.identity import host_in


@dataclass(frozen=True)
class RemoteFailure:
    """How a process says that it failed."""

    is_own: bool
    error: EvenerError

    @property
    def sentence(self) -> str:
        """For the user."""
        return str(self.error)


@dataclass(eq=False)
class RemoteRank:
    """One process.

    Attributes:
        run: that it belongs to.
        node: name of the one that it stands for.
        number: of the process.
        peer: connection over which it was started, or last known to be there.
        send: to the node, if that is there.
        said: to the authority, and not yet read by it.
        ended: what its node said of its end.
        lost: why it counts as gone, though nobody said that it ended; empty while it does not.
        is_unwanted: whether its node was told to end it.
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
        """Whether it said that its work is done."""
        return self.ended is not None and self.ended.has_finished

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, or nobody will hear of it again."""
        return self.ended is not None or bool(self.lost)

    @property
    def is_silent(self) -> bool:
        """Whether all that it said has been read: what it said came before its end."""
        return self.has_ended

    @property
    def failure(self) -> RemoteFailure | None:
        """How it failed; None if it did not say so."""
        if self.ended is None or self.ended.kind is None or self.ended.has_finished:
            return None
        return RemoteFailure(self.ended.is_own, self.ended.kind.as_error(self.ended.sentence))

    @property
    def has_failed(self) -> bool:
        """Whether it said so, or ended without a word."""
        return self.failure is not None or (self.has_ended and not self.has_finished)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return self.ended.ending if self.ended is not None else self.lost

    def tell(self, data: bytes) -> None:
        """Let the process hear the authority's words; one that has ended hears nothing."""
        if not self.has_ended:
            self.send(self.node, RankTold(run=self.run, process=self.number), (data,))

    def request_stop(self, *, at_once: bool) -> None:
        """Have it end after its step, or at once."""
        if self.ended is None:
            self.send(self.node, StopRank(run=self.run, process=self.number, at_once=at_once), ())


def why_ended(failed: Sequence[RemoteRank], stopping: EvenerError | None, num_ranks: int) -> EvenerError | None:
    """What explains the end of a run best: an own failure, that it was to stop, a death, then a lost connection.

    A failure of one node among several names that, as it lies on another machine than the user sits at.

    Args:
        failed: the ranks with which the run fails.
        stopping: why it was asked to stop; None if it was not.
        num_ranks: of the run.
    """
    told = [rank.failure for rank in failed if rank.failure is not None]
    own = [
        (rank.node, rank.failure.error)
        for rank in failed
        if rank.failure is not None and rank.failure.is_own and not isinstance(rank.failure.error, Interrupted)
    ]
    if own:
        node, first = own[0]
        is_of_all = num_ranks == 1 or [str(error) for _, error in own].count(str(first)) > 1
        is_named = is_of_all or node in str(first).split()
        return first if is_named else restated(first, f"node {node} failed: {first}")
    if stopping is not None:
        return stopping
    for rank in failed:
        if rank.failure is None:
            return NodeLost(f"node {rank.node} {rank.ending}", (rank.node,))
    return told[0].error if told else None


_LOOPBACK = "127.0.0.1"


class RemoteStarter:
    """Of one run.

    Args:
        run: its name.
        nodes: all nodes.
        send: to connections.

    Attributes:
        names: of the nodes, by rank at the start; who comes later is added.
        speeds: 1, or the fraction to which a node is slowed down, by its name.
        secret: that all processes share.
    """

    def __init__(self, run: str, nodes: Nodes, send: Send) -> None:
        self._run, self._nodes, self._send = run, nodes, send
        self.names: list[str] = []
        self.speeds: dict[str, float] = {}
        self.secret = b""

    def can_start(self, rank: int) -> bool:
        """Whether the node of this rank is here, and ready."""
        node = self._nodes.record(self.names[rank])
        return node.is_present and node.ready == self._run

    def start(self, rank: int, number: int, *, is_late: bool) -> RemoteRank:
        """A process of this number on the node of this rank, which may have begun without it."""
        node = self._nodes.record(self.names[rank])
        place = RankPlace(
            rank=0 if is_late else rank,
            nodes=tuple(self._as_rank(name) for name in ([node.name] if is_late else self.names)),
            secret=self.secret,
            patience=self._nodes.patience,
            is_late=is_late,
        )
        node.doing = f"is rank {number}"
        self._send(node.peer, StartRank(run=self._run, process=number), [encode_rank_part(place)])
        return self.known(node, number)

    def waiting(self) -> list[NodeRecord]:
        """Nodes that have come and are ready, and are no ranks yet."""
        return [node for node in self._nodes.present if node.ready == self._run and node.name not in self.names]

    def take_new(self) -> Iterator[str]:
        """Names of nodes that wait, each of which is the last rank from now on."""
        for node in self.waiting():
            self.names.append(node.name)
            yield node.name

    def known(self, node: NodeRecord, number: int) -> RemoteRank:
        """A process of this number that was started on a node before."""
        return RemoteRank(self._run, node.name, number, node.peer, self._send_to)

    def _as_rank(self, name: str) -> RankNode:
        node = self._nodes.record(name)
        host = host_in(node.origin) or _LOOPBACK
        return RankNode(name=name, host=host, device=node.device, speed=self.speeds.get(name, 1.0))

    def _send_to(self, name: str, header: Header, buffers: Sequence[Buffer]) -> None:
        self._send(self._nodes.record(name).peer, header, buffers)
