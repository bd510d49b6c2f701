"""Which nodes a run whose ranks work together did not need, and who is gone with its node."""

from __future__ import annotations

from collections.abc import Sequence

from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.remote_rank import RemoteRank

_SECONDS = 1.5
"""That a node has to come back: one that is killed closes its connection, one that lives dials at once."""


class Absences:
    """Of the nodes of one run.

    Args:
        nodes: all nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._since: dict[str, float] = {}
        self._excused = 0.0

    def excuse(self, until: float) -> None:
        """Nobody is missed before this time: the master itself was away."""
        self._excused = until

    def miss(self, ranks: Sequence[RemoteRank], now: float) -> None:
        """Those of `ranks` are gone whose nodes have been away for too long."""
        for rank in ranks:
            if self._nodes.record(rank.node).peer is not None or rank.has_ended:
                self._since.pop(rank.node, None)
            elif now - self._since.setdefault(rank.node, now) > _SECONDS and now > self._excused:
                rank.lost = "closed its connection to the master, and has not come back"


class DeclinedNodes:
    """That a run did not need; it asks them again when others are gone.

    Args:
        run: its name.
    """

    def __init__(self, run: str) -> None:
        self._run, self._nodes, self._asks_again = run, list[NodeRecord](), False

    def add(self, node: NodeRecord) -> None:
        """A node is not needed."""
        self._nodes.append(node)

    def lost(self, others: Sequence[str]) -> None:
        """A generation begins, without `others`."""
        self._asks_again |= bool(others)

    def ask_again(self, *, is_settled: bool) -> None:
        """Let them come again, if others are gone and the run knows who is left."""
        if self._asks_again and is_settled:
            for node in self._nodes:
                node.not_ready.discard(self._run)
                node.ready = self._run
            self._nodes, self._asks_again = [], False
