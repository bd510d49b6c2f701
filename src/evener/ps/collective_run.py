"""A run whose ranks work together, at the master: it has them started on the nodes, and is their authority.

nodes that are here make ready     -> one process on each of them: the ranks find each other by values that lie here
all of them can take part          -> the first generation; from now on whoever is lost, is left behind
a node comes                       -> a process there, which takes part after a step
all steps are done                 -> the record, of the first rank, and its weights

Who is lost before the first step costs nothing but time: the run begins again, three times at most.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from evener.elastic.elastic_ranks import ElasticRanks
from evener.elastic.shared_values import AskValues, SetValue, SharedValues, decode_from_rank
from evener.errors import EvenerError, NodeLost, TrainingFailed
from evener.events import decode_events
from evener.ps.messages import Header, Send
from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.rank_messages import (
    PrepareRank,
    RankEnded,
    RankJob,
    RankNode,
    RankPlace,
    RankReady,
    StartRank,
    encode_rank_part,
)
from evener.ps.rank_news import RankNews
from evener.ps.remote_rank import RemoteRank, why_ended
from evener.wire.frame import Buffer
from evener.wire.identity import SECRET_BYTES, host_in

_BEGINNINGS = 3
_GRACE = 1.0
"""Seconds that the others have to say what happened, when one of them has failed."""
_GONE_SECONDS = 1.5
"""After which a node whose connection was closed, and that has not come back, counts as gone."""
_LOOPBACK = "127.0.0.1"


class CollectiveRun:
    """One run.

    Args:
        job: to be done.
        nodes: whoever may take part.
        send: to connections.
        clock: seconds.

    Attributes:
        news: what happened.
        failure: why the run cannot go on, if it cannot.
        is_complete: whether all is done.
        weights: that it has come to; a safetensors file, empty before.
    """

    def __init__(self, job: RankJob, nodes: Nodes, send: Send, clock: Callable[[], float]) -> None:
        self.job, self._nodes, self._send, self._clock = job, nodes, send, clock
        self.news = RankNews()
        self.failure: EvenerError | None = None
        self.is_complete = False
        self.weights = b""
        self._values, self._secret = SharedValues(), b""
        self._ranks: list[RemoteRank] = []
        self._names: list[str] = []
        self._elastic: ElasticRanks[RemoteRank] | None = None
        self._speeds: dict[str, float] = {}
        self._next, self._beginnings = 1, 0
        self._first_ready, self._deadline = inf, inf
        self._away: dict[str, float] = {}
        self._stopping: EvenerError | None = None

    def admit(self, node: NodeRecord) -> None:
        """Let a node that is a member now make ready."""
        if self.job.run not in node.not_ready:
            node.doing = "prepares"
            self._send(node.peer, PrepareRank(run=self.job.run), [encode_rank_part(self.job)])

    def ready(self, node: NodeRecord, header: RankReady) -> None:
        """A node has the code; it may have come back, with its process or without it."""
        node.ready, self._speeds[node.name] = self.job.run, header.speed
        self._first_ready = min(self._first_ready, self._clock())
        self._away.pop(node.name, None)
        rank = self._rank_on(node.name)
        node.doing = "waits for the others to make ready" if rank is None else f"is rank {rank.number}"
        if rank is None or rank.has_ended or node.peer == rank.peer:
            return
        rank.peer = node.peer
        if header.process != rank.number:
            rank.lost = "came back without its process"

    def not_ready(self, node: NodeRecord, reason: str) -> None:
        """A node cannot take part."""
        node.not_ready.add(self.job.run)
        node.ready, node.doing = "", f"cannot take part: {reason}"
        self.note("left out", f"node {node.name} cannot take part: {reason}", node.name)

    def lose(self, node: NodeRecord, reason: str) -> None:
        """A node is a member no more."""
        if (rank := self._rank_on(node.name)) is not None and not rank.has_ended:
            rank.lost = reason
            rank.request_stop(at_once=True)

    def said(self, node: NodeRecord, process: int, data: bytes) -> None:
        """A process says something. Raises msgspec.DecodeError, InvalidInput: it may not."""
        rank = self._rank_on(node.name)
        if rank is None or rank.number != process or rank.has_ended:
            return
        message = decode_from_rank(data)
        if isinstance(message, SetValue | AskValues):
            for number, answer in self._values.answers(process, message):
                for one in self._ranks:
                    if one.number == number:
                        one.tell(msgspec.msgpack.encode(answer))
            return
        rank.said.append(data)
        self._govern()

    def shown(self, node: NodeRecord, process: int, data: memoryview) -> None:
        """A process tells what happened. Raises msgspec.DecodeError."""
        rank, elastic = self._rank_on(node.name), self._elastic
        if rank is not None and rank.number == process and elastic is not None and elastic.may_speak(rank):
            self.news.add(decode_events(data))

    def ended(self, node: NodeRecord, header: RankEnded, weights: Sequence[memoryview]) -> None:
        """A process has ended."""
        rank = self._rank_on(node.name)
        if rank is None or rank.number != header.process or rank.ended is not None:
            return
        rank.ended = header
        if weights:
            self.weights = bytes(weights[0])
        self._values.forget(rank.number)
        self._govern()

    @property
    def num_updates(self) -> int:
        """That were made."""
        return self.news.step.step if self.news.step is not None else 0

    def wants_weights(self, node: NodeRecord, process: int) -> bool:
        """Whether a process that has ended may bring weights."""
        rank = self._rank_on(node.name)
        return rank is not None and rank.number == process and rank.ended is None and not self.weights

    def note(self, kind: str, message: str, *nodes: str) -> None:
        """Have something told that happened to `nodes`; when they take part, their generation tells."""
        if kind not in ("joined", "back"):
            self.news.note(kind, message, nodes)

    def stop(self, error: EvenerError) -> None:
        """Have the run end, because of `error`: the ranks after their step, if they have begun."""
        if self._stopping is None:
            self._stopping, self._deadline = error, self._clock() + self._nodes.patience
            if self._elastic is not None:
                self._elastic.is_stopping = True
            for rank in self._ranks:
                rank.request_stop(at_once=False)

    def tick(self) -> None:
        """What the time brings."""
        if self._elastic is None:
            self._gather()
            if self._stopping is not None:
                self.failure = self._stopping
            return
        self._miss()
        self._govern()
        if self._elastic is not None and self._elastic.has_begun and self._stopping is None:
            for node in self._nodes.present:
                if node.ready == self.job.run and node.name not in self._names:
                    self._names.append(node.name)
                    self._elastic.add_node()
        self._see_end()

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.request_stop(at_once=True)

    def _gather(self) -> None:
        """Begin once all who are here are ready, or one has waited for the others for the patience."""
        run, present = self.job.run, [node for node in self._nodes.present if node.profile is not None]
        able = [node for node in present if run not in node.not_ready]
        ready = [node for node in able if node.ready == run]
        if present and not able:
            reasons = "; ".join(f"node {node.name} {node.doing}" for node in present)
            self.failure = TrainingFailed(f"no node can take part in the run: {reasons}")
        elif ready and (len(ready) == len(able) or self._clock() - self._first_ready > self._nodes.patience):
            self._begin(ready)

    def _begin(self, founders: Sequence[NodeRecord]) -> None:
        """A process on each of the nodes."""
        self._beginnings += 1
        self._values, self._secret = SharedValues(), secrets.token_bytes(SECRET_BYTES)
        self._names, first = [node.name for node in founders], self._next
        self._next += len(founders)
        self._ranks = []
        self._ranks += [self._start(rank, first + rank, is_late=False) for rank in range(len(founders))]
        self._elastic = ElasticRanks(
            self._ranks, self._nodes.patience, self._start_late, can_start=self._can_start, first=first
        )

    def _can_start(self, rank: int) -> bool:
        node = self._nodes.by_name[self._names[rank]]
        return node.is_present and node.ready == self.job.run

    def _start_late(self, rank: int, number: int) -> RemoteRank:
        self._next = max(self._next, number + 1)
        return self._start(rank, number, is_late=True)

    def _start(self, rank: int, number: int, *, is_late: bool) -> RemoteRank:
        names = [self._names[rank]] if is_late else self._names
        place = RankPlace(
            rank=0 if is_late else rank,
            nodes=tuple(self._as_rank(self._nodes.by_name[name]) for name in names),
            secret=self._secret,
            patience=self._nodes.patience,
            is_late=is_late,
        )
        node = self._nodes.by_name[self._names[rank]]
        node.doing = f"is rank {number}"
        self._send(node.peer, StartRank(run=self.job.run, process=number), [encode_rank_part(place)])
        return RemoteRank(self.job.run, node.name, number, node.peer, self._send_to)

    def _as_rank(self, node: NodeRecord) -> RankNode:
        host = host_in(node.origin) or _LOOPBACK
        return RankNode(name=node.name, host=host, device=node.device, speed=self._speeds.get(node.name, 1.0))

    def _send_to(self, name: str, header: Header, buffers: Sequence[Buffer]) -> None:
        self._send(self._nodes.by_name[name].peer, header, buffers)

    def _rank_on(self, name: str) -> RemoteRank | None:
        return next((rank for rank in self._ranks if rank.node == name), None)

    def _miss(self) -> None:
        """Whose connection was closed, and who has not come back, is gone."""
        now = self._clock()
        for rank in self._ranks:
            if self._nodes.by_name[rank.node].peer is not None or rank.has_ended:
                self._away.pop(rank.node, None)
            elif now - self._away.setdefault(rank.node, now) > _GONE_SECONDS:
                rank.lost = "closed its connection to the master, and has not come back"

    def _govern(self) -> None:
        if self._elastic is not None and self.failure is None and not self.is_complete:
            try:
                self._elastic.govern()
            except NodeLost as error:
                self.failure = error

    def _see_end(self) -> None:
        """Whether the run is over, and how."""
        elastic, now = self._elastic, self._clock()
        if elastic is None or self.failure is not None:
            return
        failed = [rank for rank in self._ranks if elastic.ends_the_run(rank)]
        if failed and self._deadline == inf:
            self._deadline = now + _GRACE
        needed = [rank for rank in self._ranks if elastic.is_needed(rank)]
        if all(rank.has_ended for rank in needed) or now > self._deadline:
            self._conclude(failed)

    def _conclude(self, failed: Sequence[RemoteRank]) -> None:
        """How a run ended of which nobody is left, or is waited for any more."""
        error = why_ended(failed, self._stopping)
        if error is None and self.news.record is None:
            error = TrainingFailed("the run ended without a record")
        if isinstance(error, NodeLost) and self._may_begin_again():
            self.note("begins again", f"before the first step {error}")
            self._begin_again()
        elif error is not None:
            self.failure = error
        else:
            self.is_complete = True

    def _may_begin_again(self) -> bool:
        has_begun = self.news.step is not None or (self._elastic is not None and self._elastic.has_begun)
        return not has_begun and self._beginnings < _BEGINNINGS

    def _begin_again(self) -> None:
        """From the beginning, with those who are here then."""
        self.close()
        self._elastic, self._ranks, self._names = None, [], []
        self._first_ready, self._deadline = self._clock(), inf
