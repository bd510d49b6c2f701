"""A run whose ranks work together, at the master: it has them started on the nodes, and is their authority.

nodes that are here make ready     -> one process on each of them: the ranks find each other by values that lie here
all of them can take part          -> the first generation; from now on whoever is lost, is left behind
a node comes                       -> a process there, which takes part after a step
all steps are done                 -> the record, of the first rank, and its weights

Who is lost before the first step costs nothing but time: the run begins again, three times at most. When nobody is left
who holds the state, it begins again from the last checkpoint that is here, with whoever comes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from evener.membership.elastic_ranks import ElasticRanks
from evener.membership.generation import Generation
from evener.membership.shared_values import AskValues, SetValue, SharedValues, decode_from_rank
from evener.ps.master.collective.rank_checkpoints import RankCheckpoints
from evener.ps.master.collective.rank_journal import Begun, Found, Kept, RankJournal
from evener.ps.master.collective.rank_lifecycle import Beginnings, RunEnding
from evener.ps.master.collective.rank_news import MOST_EVENT_BYTES, RankNews
from evener.ps.master.collective.rank_table import Absences, DeclinedNodes, RankTable
from evener.ps.master.collective.remote_rank import RemoteRank, RemoteStarter
from evener.ps.master.node_state import return_seconds
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.protocol.messages import Send
from evener.ps.protocol.rank_messages import (
    MOST_WORDS,
    PrepareRank,
    RankEnded,
    RankJob,
    RankReady,
    RankSaved,
    encode_rank_part,
)
from evener.records.errors import EvenerError, LineCut, NodeLost, NotNeeded, NoUsableNode
from evener.records.events import sized_events
from evener.records.record import Step
from evener.wire.identity import SECRET_BYTES


class CollectiveRun:
    """One run.

    Args:
        job: to be done.
        nodes: whoever may take part.
        send: to connections.
        clock: seconds.
        journal: where it is written down.
        checkpoints: of its ranks.

    Attributes:
        checkpoints: see above.
        news: what happened.
        failure: why the run cannot go on, if it cannot.
        is_complete: whether all is done.
        weights: that it has come to; a safetensors file, empty before.
    """

    def __init__(
        self,
        job: RankJob,
        nodes: Nodes,
        send: Send,
        clock: Callable[[], float],
        journal: RankJournal,
        checkpoints: RankCheckpoints,
    ) -> None:
        self.job, self._nodes, self._send, self._clock, self._journal = job, nodes, send, clock, journal
        self.checkpoints, self._beginnings = checkpoints, Beginnings(nodes, job.run)
        self.news = RankNews(clock)
        self.failure: EvenerError | None = None
        self.is_complete = False
        self.weights, self._bringing = b"", ""
        self._values, self._starter = SharedValues(), RemoteStarter(job.run, nodes, send)
        self._table = RankTable(self._starter, journal)
        self._elastic: ElasticRanks[RemoteRank] | None = None
        self._step_before: Step | None = None
        self._newcomers_from: int | None = None  # step of the checkpoint that was here when nodes came that wait
        self._ending = RunEnding(nodes.patience)
        self._absences = Absences(nodes)
        self._declined = DeclinedNodes(job.run)

    def resume(self, found: Found) -> None:
        """Go on with the run of a master that was killed: its nodes have time to come back."""
        roster = found.roster
        self.note("master restarted", "the master goes on with the run that it had in progress")
        if not roster.names:
            return  # no process was started yet: it begins when nodes are ready
        self._starter.secret, self._values = found.begun.secret, self._kept_values(found.values)
        self._table.resume(roster, self._nodes.record)
        self._beginnings.resume()
        absence = return_seconds(self._nodes.patience)
        self._absences.excuse(self._clock() + absence)
        self.checkpoints.last = found.saved or self.checkpoints.last
        self._elastic = self._govern_ranks(0)
        self._elastic.resume(roster.generation, roster.numbers, roster.given_up, roster.next, absence)

    def admit(self, node: NodeRecord) -> None:
        """Let a node that is a member now make ready."""
        if self.job.run not in node.not_ready:
            node.doing = "prepares"
            self._send(node.peer, PrepareRank(run=self.job.run), [encode_rank_part(self.job)])

    def ready(self, node: NodeRecord, header: RankReady) -> None:
        """A node has the code; it may have come back, with its process or without it."""
        node.ready, self._starter.speeds[node.name] = self.job.run, header.speed
        self._beginnings.ready(self._clock())
        self._absences.is_back(node.name)
        rank = self._table.on(node.name)
        node.doing = "waits for the others to make ready" if rank is None else f"is rank {rank.number}"
        if rank is None or rank.has_ended or node.peer == rank.peer:
            return
        rank.peer, rank.is_unwanted = node.peer, False
        if header.process != rank.number:
            rank.lost = "came back without its process"

    def not_ready(self, node: NodeRecord, reason: str) -> None:
        """A node cannot take part."""
        node.not_ready.add(self.job.run)
        node.ready, node.doing = "", f"cannot take part: {reason}"
        self._table.lose(node.name, f"cannot take part: {reason}")
        self.note("left out", f"node {node.name} cannot take part: {reason}", node.name)

    def lose(self, node: NodeRecord, reason: str, *, is_silent: bool = False) -> None:
        """A node is a member no more; `reason` is a clause, as "it has been silent for 6 s".

        A silent one whose process is the last that holds the state is waited for as long as the authority waits.
        """
        self.checkpoints.left(node)
        last = self._table.on(node.name)
        if is_silent and last is not None and self._elastic is not None and self._elastic.is_last_holder(last):
            self._absences.bear(node.name)
            return
        if (rank := self._table.lose(node.name, reason.removeprefix("it "))) is not None:  # its name comes before it
            rank.request_stop(at_once=True)

    def said(self, node: NodeRecord, process: int, data: bytes) -> None:
        """A process says something. Raises msgspec.DecodeError, InvalidInput: it may not."""
        rank = self._table.of(node, process)
        if rank is None or rank.has_ended:
            return
        message = decode_from_rank(data)
        if isinstance(message, SetValue | AskValues):
            for number, answer in self._values.answers(process, message, node.name):
                self._table.tell(number, msgspec.msgpack.encode(answer))
            return
        rank.said.append(data)
        self._govern()

    def shown(self, node: NodeRecord, process: int, data: memoryview) -> None:
        """A process tells what happened. Raises msgspec.DecodeError."""
        if self._may_speak(node, process):
            self.news.add(sized_events(data, MOST_EVENT_BYTES))

    def saved(self, node: NodeRecord, header: RankSaved) -> None:
        """A process has written a checkpoint."""
        if self._may_speak(node, header.process):
            self.checkpoints.offered(node, header)

    def ended(self, node: NodeRecord, header: RankEnded, weights: Sequence[memoryview]) -> None:
        """A process has ended."""
        rank = self._table.of(node, header.process)
        if rank is None or rank.ended is not None:
            return
        rank.ended = header
        if rank.failure is not None and isinstance(rank.failure.error, NotNeeded | LineCut):
            self._declined.add(node)
            self.not_ready(node, header.sentence)
        if weights:
            self.weights = bytes(weights[0])
        self._values.forget(rank.number)
        self._govern()

    @property
    def num_updates(self) -> int:
        """That were made."""
        return self.news.step.step if self.news.step is not None else 0

    def wants_weights(self, node: NodeRecord, process: int) -> bool:
        """Whether a process that has ended may bring weights: one at a time, until they are here."""
        rank = self._table.of(node, process)
        if rank is None or rank.ended is not None or self.weights or self._bringing not in ("", node.name):
            return False
        self._bringing = node.name
        return True

    def wants(self, node: NodeRecord, process: int, num_bytes: int) -> bool:
        """Whether a process may say or show something of this length."""
        return self._table.of(node, process) is not None and (
            num_bytes <= MOST_WORDS or (not self.news.has_record and self._may_speak(node, process))
        )

    def left(self, node: NodeRecord) -> None:
        """The connection of a node is gone, and with it what it was bringing."""
        if self._bringing == node.name:
            self._bringing = ""

    def note(self, kind: str, message: str, *nodes: str) -> None:
        """Have something told that happened to `nodes`; when they take part, their generation tells."""
        if kind not in ("joined", "back"):
            self.news.note(kind, message, nodes)

    def stop(self, error: EvenerError) -> None:
        """Have the run end, because of `error`: the ranks after their step, if they have begun."""
        if self._ending.stop(error, self._clock()):
            if self._elastic is not None:
                self._elastic.is_stopping = True
            self._table.request_stop(at_once=False)

    def tick(self) -> None:
        """What the time brings."""
        self.checkpoints.tick()
        if self._elastic is None:
            self._gather()
            self.failure = self._ending.reason or self.failure
            return
        self._absences.miss(self._table.ranks, self._clock())
        self._govern()
        if self._elastic is None:
            return  # it begins again
        self._table.end_given_up(self._elastic)
        self._declined.ask_again(is_settled=self._elastic.is_settled)
        if self._elastic.has_begun and self._ending.reason is None:
            for _ in self._starter.take_new():
                self._elastic.add_node()
        self._see_end()
        self._take_in_at_a_checkpoint()

    def close(self) -> None:
        """End all processes."""
        self._table.request_stop(at_once=True)

    def _gather(self) -> None:
        """Begin, if it is time to."""
        try:
            if founders := self._beginnings.founders(self._clock()):
                self._begin(founders)
        except NoUsableNode as error:
            self.failure = error

    def _begin(self, founders: Sequence[NodeRecord]) -> None:
        """A process on each of the nodes."""
        self._beginnings.begins()
        self._values, self._starter.secret = self._kept_values({}), secrets.token_bytes(SECRET_BYTES)
        self._journal.add(Begun(job=self.job, secret=self._starter.secret))
        self._elastic = self._govern_ranks(self._table.begin(founders))
        self._write(None)

    def _kept_values(self, found: Mapping[str, bytes]) -> SharedValues:
        return SharedValues(lambda key, value: self._journal.add(Kept(key=key, value=value)), found)

    def _govern_ranks(self, first: int) -> ElasticRanks[RemoteRank]:
        return ElasticRanks(
            self._table.ranks,
            self._nodes.patience,
            self._start_late,
            can_start=self._starter.can_start,
            first=first,
            keep=self._write,
            advice="",  # it begins again by itself, if it can
            notify=self.note,
        )

    def _write(self, generation: Generation | None) -> None:
        """Write down who stands for which node, and takes part."""
        self._declined.lost(generation.lost if generation is not None else ())
        self._table.write(generation, self._elastic)

    def _start_late(self, rank: int, number: int) -> RemoteRank:
        self._table.count(number)
        self._write(None if self._elastic is None else self._elastic.generation)
        return self._starter.start(rank, number, is_late=True)

    def _may_speak(self, node: NodeRecord, process: int) -> bool:
        """Whether what a process tells is of the run: it takes part."""
        rank = self._table.of(node, process)
        return rank is not None and self._elastic is not None and self._elastic.may_speak(rank)

    def _govern(self) -> None:
        if self._elastic is not None and self.failure is None and not self.is_complete:
            try:
                self._elastic.govern()
                if not self._table.is_written:
                    self._write(self._elastic.generation)
            except NodeLost as error:
                self._end_by(error)

    def _see_end(self) -> None:
        """Whether the run is over, and how."""
        elastic = self._elastic
        if (
            elastic is None
            or self.failure is not None
            or not self._ending.is_over(elastic, self._table.ranks, self._clock())
        ):
            return
        error = self._ending.error(elastic, self._table.ranks, has_record=self.news.has_record)
        if error is None:
            self.is_complete = True
        else:
            self._end_by(error)

    @property
    def _has_begun(self) -> bool:
        """Whether the ranks may have made a step since the run began last."""
        return self.news.step is not self._step_before or (self._elastic is not None and self._elastic.has_trained)

    def _take_in_at_a_checkpoint(self) -> None:
        """Begin again from the next checkpoint, if nodes have come to a run that began on one node.

        That one cannot make room for them: nothing was measured or checked there that concerns several nodes.
        """
        elastic, saved = self._elastic, self.checkpoints.last
        is_on_one = elastic is not None and not elastic.has_begun and len(self._table.ranks) == 1 and self._has_begun
        new = self._starter.waiting() if is_on_one and self._ending.reason is None and self.failure is None else []
        if not new or self.is_complete:
            self._newcomers_from = None
            return
        if self._newcomers_from is None:
            self._newcomers_from = saved.step
            for node in new:
                node.doing = "waits for the next checkpoint"
                words = f"node {node.name} takes part after the next checkpoint, as the run began on one node"
                self.note("waiting", words, node.name)
        elif saved.step > self._newcomers_from and (
            words := self._beginnings.from_checkpoint(saved.step, 1 + len(new))
        ):
            self._begin_again(f"{words} {', '.join(node.name for node in new)} came", from_checkpoint=True)

    def _begin_again(self, why: str, *, from_checkpoint: bool) -> None:
        """End all processes, and begin with whoever is ready."""
        self.note("begins again", why)
        self.close()
        self.news.forget_record()
        self._ending.begins_again()
        self._elastic = self._newcomers_from = None
        self._table.clear()
        self._step_before = self.news.step
        if from_checkpoint:
            self.job = replace(self.job, checkpoint=self.checkpoints.last.digest)
            for node in self._nodes.present:
                node.ready = ""
                self.admit(node)

    def _end_by(self, error: EvenerError) -> None:
        """The run cannot go on as it is: it begins again, if nodes were lost and it may, or fails."""
        has_begun, saved, nodes = self._has_begun, self.checkpoints.last, self._founders_that_can()
        began_from = self._beginnings.step
        words = self._beginnings.again(
            error, saved.step, self._clock(), has_begun=has_begun, before=len(self._table.ranks), able=len(nodes)
        )
        if not words and not has_begun:
            words = self._leave_behind(error, nodes)
        if not words or self._ending.reason is not None:
            self.failure = error if has_begun else self._beginnings.explained(error)
            return
        self._begin_again(f"{words} {error}", from_checkpoint=self._beginnings.step != began_from)

    def _founders_that_can(self) -> list[NodeRecord]:
        """Return the nodes of the ranks, without those that cannot take part."""
        nodes = [self._nodes.record(rank.node) for rank in self._table.ranks]
        return [node for node in nodes if self.job.run not in node.not_ready]

    def _leave_behind(self, error: EvenerError, founders: Sequence[NodeRecord]) -> str:
        """Leave out those of the `founders` that `error` names, if others can begin; from where, in words."""
        names = error.nodes if isinstance(error, NodeLost) else ()
        lost = [node for node in founders if node.name in names]
        if not lost or self._ending.reason is not None:
            return ""
        here = [node for node in self._nodes.present if self.job.run not in node.not_ready]
        others = {node.name for node in (*founders, *here)}.difference(names)
        words = self._beginnings.without(error, self._clock(), len(others))
        for node in lost if words else ():
            self.not_ready(node, "it was lost before the first step, which the run has tried three times")
        return words
