"""Which process stands for which node of a run whose ranks work together, and which nodes are gone or were not needed.

The first is written down whenever it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.membership.elastic_ranks import ElasticRanks
from evener.membership.generation import Generation
from evener.ps.master.collective.rank_journal import RankJournal, Roster, roster_of
from evener.ps.master.collective.remote_rank import RemoteRank, RemoteStarter
from evener.ps.master.nodes import NodeRecord, Nodes


class RankTable:
    """Of one run.

    Args:
        starter: of its processes.
        journal: where it is written down.

    Attributes:
        ranks: the processes, by rank; whoever governs them replaces and adds.
    """

    def __init__(self, starter: RemoteStarter, journal: RankJournal) -> None:
        self.ranks: list[RemoteRank] = []
        self._starter, self._journal = starter, journal
        self._next, self._written = 1, list[int]()

    def begin(self, founders: Sequence[NodeRecord]) -> int:
        """A process on each of the nodes; the number of the first."""
        first = self._next
        self._next += len(founders)
        self._starter.names = [node.name for node in founders]
        self.ranks = [self._starter.start(rank, first + rank, is_late=False) for rank in range(len(founders))]
        return first

    def resume(self, roster: Roster, record: Callable[[str], NodeRecord]) -> None:
        """Those that were started by a master that was killed; `record` is a node's, by its name."""
        self._starter.names, self._next = list(roster.names), roster.next
        numbered = zip(roster.names, roster.numbers, strict=True)
        self.ranks = [self._starter.known(record(name), number) for name, number in numbered]

    def clear(self) -> None:
        """Nobody stands for any node."""
        self.ranks, self._starter.names = [], []

    def count(self, number: int) -> None:
        """A process of this number is about to be started."""
        self._next = max(self._next, number + 1)

    def write(self, generation: Generation | None, elastic: ElasticRanks[RemoteRank] | None) -> None:
        """Write down who stands for which node, and takes part since `generation`."""
        given_up = [rank.number for rank in self.ranks if elastic is not None and elastic.has_given_up(rank)]
        numbers = {rank.node: rank.number for rank in self.ranks}
        self._written = list(numbers.values())
        self._journal.add(roster_of(numbers, given_up, self._next, generation))

    def lose(self, name: str, reason: str) -> RemoteRank | None:
        """The process on the node of this name counts as gone: which one, if it was not before."""
        rank = self.on(name)
        if rank is None or rank.has_ended:
            return None
        rank.lost = reason
        return rank

    def tell(self, number: int, data: bytes) -> None:
        """Let the process of this number hear the authority's words."""
        for rank in self.ranks:
            if rank.number == number:
                rank.tell(data)

    def request_stop(self, *, at_once: bool) -> None:
        """Have all end after their step, or at once."""
        for rank in self.ranks:
            rank.request_stop(at_once=at_once)

    def end_given_up(self, elastic: ElasticRanks[RemoteRank]) -> None:
        """A process without which the run goes on may be frozen: its node ends it, and is given another one."""
        for rank in self.ranks:
            if elastic.has_given_up(rank) and not rank.is_unwanted:
                rank.is_unwanted = True
                rank.request_stop(at_once=True)

    @property
    def is_written(self) -> bool:
        """Whether what is written down names these processes."""
        return self._written == [rank.number for rank in self.ranks]

    def on(self, name: str) -> RemoteRank | None:
        """The process that stands for the node of this name."""
        return next((rank for rank in self.ranks if rank.node == name), None)

    def of(self, node: NodeRecord, process: int) -> RemoteRank | None:
        """The process of this number on a node, if it is the one that stands for it."""
        rank = self.on(node.name)
        return rank if rank is not None and rank.number == process else None


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
        self._borne: set[str] = set()

    def bear(self, name: str) -> None:
        """The node of this name is silent, and the authority waits for its process: it is not missed here."""
        self._borne.add(name)

    def is_back(self, name: str) -> None:
        """The node of this name is ready again."""
        self._borne.discard(name)

    def excuse(self, until: float) -> None:
        """Nobody is missed before this time: the master itself was away."""
        self._excused = until

    def miss(self, ranks: Sequence[RemoteRank], now: float) -> None:
        """Those of `ranks` are gone whose nodes have been away for too long."""
        for rank in ranks:
            if self._nodes.record(rank.node).peer is not None or rank.has_ended or rank.node in self._borne:
                self._since.pop(rank.node, None)
            elif now - self._since.setdefault(rank.node, now) > _SECONDS and now > self._excused:
                rank.lost = "closed its connection to the master, and has not come back"


class DeclinedNodes:
    """That a run did not need, or whose line to another is cut; it asks them again when others are gone.

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
        self._asks_again |= any(other not in [node.name for node in self._nodes] for other in others)

    def ask_again(self, *, is_settled: bool) -> None:
        """Let them come again, if others are gone and the run knows who is left."""
        if self._asks_again and is_settled:
            for node in self._nodes:
                node.not_ready.discard(self._run)
                node.ready = self._run
            self._nodes, self._asks_again = [], False
