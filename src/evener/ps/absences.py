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


def ask_again(declined: Sequence[NodeRecord], run: str) -> list[NodeRecord]:
    """Let nodes that `run` did not need come again, now that others are gone; nobody is declined any more."""
    for node in declined:
        node.not_ready.discard(run)
        node.ready = run
    return []
