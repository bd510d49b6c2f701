"""Has the processes of a run started on the nodes, each with its place among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evener.ps.messages import Header, Send
from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.rank_messages import RankNode, RankPlace, StartRank, encode_rank_part
from evener.ps.remote_rank import RemoteRank
from evener.wire.frame import Buffer
from evener.wire.identity import host_in

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

    def take_new(self) -> Iterator[str]:
        """Names of nodes that have come and are ready, each of which is the last rank from now on."""
        for node in self._nodes.present:
            if node.ready == self._run and node.name not in self.names:
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
