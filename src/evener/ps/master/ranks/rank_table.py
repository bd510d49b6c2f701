"""The process of each node of a run whose ranks work together, and the nodes that are absent or were rejected.

The processes are saved whenever they change.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import IO

import msgspec

from evener.membership.generation import Generation
from evener.membership.rank_supervisor import RankSupervisor
from evener.ps.master.access.quotas import Allowance
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.ranks.rank_journal import RankJournal, Roster, roster_of
from evener.ps.master.ranks.remote_rank import RemoteRank, RemoteStarter
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.record import Epoch, Event, Step, TrainRecord, Validation


class RankTable:
    """The processes of one run.

    Args:
        starter: starts its processes.
        journal: journal of the run.

    Attributes:
        ranks: processes by rank; the supervisor replaces and adds.
    """

    def __init__(self, starter: RemoteStarter, journal: RankJournal) -> None:
        self.ranks: list[RemoteRank] = []
        self._starter, self._journal = starter, journal
        self._next, self._written = 1, list[int]()

    def begin(self, nodes: Sequence[NodeRecord]) -> int:
        """Start a process on each of the nodes; return the number of the first."""
        first = self._next
        self._next += len(nodes)
        self._starter.names = [node.name for node in nodes]
        self.ranks = [self._starter.start(rank, first + rank, is_late=False) for rank in range(len(nodes))]
        return first

    def resume(self, roster: Roster, record: Callable[[str], NodeRecord]) -> None:
        """Restore the processes of a master that was killed; `record` returns a node by its name."""
        self._starter.names, self._next = list(roster.names), roster.next
        numbered = zip(roster.names, roster.numbers, strict=True)
        self.ranks = [self._starter.known(record(name), number) for name, number in numbered]

    def clear(self) -> None:
        """Remove all processes."""
        self.ranks, self._starter.names = [], []

    def count(self, number: int) -> None:
        """Reserve the number of a process that is about to be started."""
        self._next = max(self._next, number + 1)

    def write(self, generation: Generation | None, supervisor: RankSupervisor[RemoteRank] | None) -> None:
        """Save the processes and `generation`."""
        given_up = [rank.number for rank in self.ranks if supervisor is not None and supervisor.is_lost(rank)]
        numbers = {rank.node: rank.number for rank in self.ranks}
        self._written = list(numbers.values())
        self._journal.add(roster_of(numbers, given_up, self._next, generation))

    def lose(self, name: str, reason: str) -> RemoteRank | None:
        """Mark the process of the node `name` as lost; return it unless it had ended before."""
        rank = self.on(name)
        if rank is None or rank.has_ended:
            return None
        rank.lost = reason
        return rank

    def tell(self, number: int, data: bytes) -> None:
        """Send a message of the coordinator to the process of this number."""
        for rank in self.ranks:
            if rank.number == number:
                rank.tell(data)

    def request_stop(self, *, at_once: bool) -> None:
        """End all processes after their step, or at once."""
        for rank in self.ranks:
            rank.request_stop(at_once=at_once)

    def end_given_up(self, supervisor: RankSupervisor[RemoteRank]) -> None:
        """End lost processes, which may be frozen, so that their nodes can start others."""
        for rank in self.ranks:
            if supervisor.is_lost(rank) and not rank.is_unwanted:
                rank.is_unwanted = True
                rank.request_stop(at_once=True)

    @property
    def is_written(self) -> bool:
        """Whether the saved processes are the current ones."""
        return self._written == [rank.number for rank in self.ranks]

    def on(self, name: str) -> RemoteRank | None:
        """Return the process of the node of this name."""
        return next((rank for rank in self.ranks if rank.node == name), None)

    def of(self, node: NodeRecord, process: int) -> RemoteRank | None:
        """Return the process of a node if it has this number."""
        rank = self.on(node.name)
        return rank if rank is not None and rank.number == process else None


_RECONNECT_S = 1.5
"""Time in which a node has to reconnect: a killed node closes its connection, and a living one reconnects at once."""


class Absences:
    """Absent nodes of one run.

    Args:
        nodes: all nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._since: dict[str, float] = {}
        self._excused_until = 0.0
        self._excused_names: set[str] = set()

    def excuse_node(self, name: str) -> None:
        """Excuse a silent node whose process the coordinator waits for."""
        self._excused_names.add(name)

    def is_back(self, name: str) -> None:
        """Stop excusing a node that is ready again."""
        self._excused_names.discard(name)

    def excuse_all(self, until: float) -> None:
        """Excuse all nodes until this time, since the master itself was away."""
        self._excused_until = until

    def miss(self, ranks: Sequence[RemoteRank], now: float) -> None:
        """Mark ranks as lost if their nodes have been disconnected for too long."""
        for rank in ranks:
            if self._nodes.record(rank.node).peer is not None or rank.has_ended or rank.node in self._excused_names:
                self._since.pop(rank.node, None)
            elif now - self._since.setdefault(rank.node, now) > _RECONNECT_S and now > self._excused_until:
                rank.lost = "closed its connection to the master, and has not reconnected"


LINE_RETRY_S = 30.0
"""Time after which a node whose line to another is cut tries again to join."""
_MAX_DOUBLINGS = 6
"""Limit of the pause between two tries in a run on one node, which restarts for each of them: half an hour."""


class RejectedNodes:
    """Nodes that stay out of a run, and are asked again: when others are lost, or after a while if a line is cut.

    Args:
        run: name of the run.
    """

    def __init__(self, run: str) -> None:
        self._run, self._nodes, self._asks_again = run, list[NodeRecord](), False
        self._due: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._failures: dict[str, int] = {}

    def add(self, node: NodeRecord) -> None:
        """Add a node that the run rejected as not beneficial."""
        self._nodes.append(node)

    def add_cut(self, node: NodeRecord, reason: str, now: float) -> bool:
        """Add a node whose line to another is cut; return whether the reason is new since it last took part."""
        self.add(node)
        self._due[node.name] = now + LINE_RETRY_S
        self._failures[node.name] = self._failures.get(node.name, -1) + 1
        before, self._reasons[node.name] = self._reasons.get(node.name), reason
        return before != reason

    def ask_all(self) -> None:
        """Let all rejected nodes join when the generation is settled, because another one is about to leave."""
        self._asks_again = True

    def changed(self, generation: Generation) -> None:
        """Note the nodes that a new generation has lost and gained."""
        gone = {*generation.lost, *generation.left}
        self._asks_again |= not gone <= {node.name for node in self._nodes}
        for name in generation.joined:
            self._reasons.pop(name, None)
            self._failures.pop(name, None)

    def ask_again(self, now: float, *, is_computing: bool, restarts: bool = False) -> None:
        """Let rejected nodes join if it is time to and the generation computes.

        If the run `restarts` for each try, the pauses between tries of a node with a cut line double.
        """
        if not is_computing:
            return
        for node in list(self._nodes):
            more = 2 ** min(self._failures.get(node.name, 0), _MAX_DOUBLINGS) - 1 if restarts else 0
            if self._asks_again or now >= self._due.get(node.name, inf) + more * LINE_RETRY_S:
                node.left_out_of.discard(self._run)
                node.ready_for = self._run
                self._nodes.remove(node)
                self._due.pop(node.name, None)
        self._asks_again = False


MAX_EVENT_BYTES = 2**17
"""Limit of one encoded event; larger ones are ignored."""
_MAX_PENDING_BYTES = 2**20
"""Limit of the steps that wait to be sent; other events have lower limits."""
_MAX_EPOCHS = 10_000
"""Limit of the ends of epochs that are remembered for new subscribers."""
_AT_ONCE_BYTES, _BYTES_PER_SECOND = 2**19, 2**13
"""Limits of all other events; steps are summed, and sent a few times a second."""


class RankNews:
    """Events of one run.

    Args:
        clock: seconds.

    Attributes:
        events: events that were not sent yet.
        plan, phase, step, validation: the last of each kind.
        epochs: ends of epochs, by epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._record: IO[bytes] | None = None
        self.plan: Plan | None = None
        self.phase: Phase | None = None
        self.step: Step | None = None
        self.validation: Validation | None = None
        self.events: list[RunEvent] = []
        self.epochs: dict[int, Epoch] = {}
        self._pending_bytes = 0
        self._allowance = Allowance(_AT_ONCE_BYTES, _BYTES_PER_SECOND, clock)

    def add(self, events: Iterable[tuple[int, RunEvent]]) -> None:
        """Add events of the ranks, each with its size in bytes."""
        for size, event in events:
            if isinstance(event, TrainRecord):
                self._keep(event)
            elif isinstance(event, Plan) and event == self.plan:
                continue  # sent again over a new connection
            elif isinstance(event, Epoch):
                is_new = event.epoch not in self.epochs  # a restart repeats what followed the checkpoint
                if is_new and len(self.epochs) < _MAX_EPOCHS and self._allowance.take(size):
                    self.epochs[event.epoch] = event
                    self.events.append(event)
            elif isinstance(event, Step):
                is_summed = self.step is not None and len(self.step.nodes) == len(event.nodes)
                self.step = event
                if self._pending_bytes + size <= _MAX_PENDING_BYTES and (is_summed or self._allowance.take(size)):
                    self._pending_bytes += size
                    self.events.append(event)
            else:
                self._remember(event)
                if self._allowance.take(size):
                    self.events.append(event)

    @property
    def has_record(self) -> bool:
        """Whether the ranks have sent the record of the run."""
        return self._record is not None

    @property
    def record(self) -> bytes:
        """The record of the run as JSON; empty before."""
        if self._record is None:
            return b""
        self._record.seek(0)
        return self._record.read()

    def forget_record(self) -> None:
        """Forget the record: the run restarts."""
        if self._record is not None:
            self._record.close()
            self._record = None

    def note(self, kind: str, message: str, nodes: tuple[str, ...]) -> None:
        """Add an event about `nodes`."""
        event = Event(step=self.step.step if self.step else 0, kind=kind, message=message, nodes=nodes)
        if self._allowance.take(len(message) + sum(map(len, nodes))):
            self.events.append(event)

    def take(self) -> list[RunEvent]:
        """Return the events since the last call."""
        events, self.events, self._pending_bytes = self.events, [], 0
        return events

    @property
    def so_far(self) -> list[RunEvent]:
        """Events for a new subscriber: the epochs that have ended, the plan and the phase."""
        return [*self.epochs.values(), *(event for event in (self.plan, self.phase) if event is not None)]

    def _keep(self, record: TrainRecord) -> None:
        """Store a record, which may be large, in a temporary file."""
        self.forget_record()
        self._record = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `forget_record`
        self._record.write(msgspec.json.encode(record))

    def _remember(self, event: RunEvent) -> None:
        if isinstance(event, Plan):
            self.plan = event
        elif isinstance(event, Phase):
            self.phase = event
        elif isinstance(event, Validation):
            self.validation = event
