"""The training of one run whose ranks work together, at the master, which starts the ranks and coordinates them.

connected nodes are ready          -> one process on each of them; the ranks rendezvous through the master's values
all of them can take part          -> the first generation; from now on the run continues without lost ranks
a node joins                       -> a process there, which takes part after a step
other nodes are assigned to it     -> the ranks stop after a step, with a checkpoint, from which those nodes go on
all steps are done                 -> the record of the first rank, and its weights

If a rank is lost before the first step, the run restarts; it starts three times at most. If no remaining rank holds the
state, it restarts from the master's last checkpoint, with the nodes that are available.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from evener.membership.generation import Generation
from evener.membership.rank_supervisor import RankSupervisor
from evener.membership.shared_values import AskValues, SetValue, SharedValues, decode_from_rank
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.ranks.rank_checkpoints import RankCheckpoints
from evener.ps.master.ranks.rank_journal import (
    Assigned,
    JournalState,
    RankJournal,
    ReportedEpoch,
    RunStart,
    StoredValue,
)
from evener.ps.master.ranks.rank_lifecycle import Beginnings, RunEnding
from evener.ps.master.ranks.rank_table import MAX_EVENT_BYTES, Absences, RankNews, RankTable, RejectedNodes
from evener.ps.master.ranks.remote_rank import RemoteRank, RemoteStarter
from evener.ps.protocol.config import return_seconds
from evener.ps.protocol.messages import Send
from evener.ps.protocol.rank_messages import (
    MAX_MESSAGE_BYTES,
    PrepareRank,
    RankEnded,
    RankJob,
    RankReady,
    RankSaved,
    encode_rank_part,
)
from evener.records.errors import (
    DoesNotFit,
    EvenerError,
    Interrupted,
    InvalidInput,
    LineCut,
    NodeLost,
    NotNeeded,
    NoUsableNode,
)
from evener.records.events import sized_events
from evener.records.record import Step
from evener.wire.errors import BadFrame
from evener.wire.identity import SECRET_BYTES

_ROOM_SECONDS = 120.0
"""Time after which a run ends because there is no room for its weights: others may take it for a while."""


class RankTraining:
    """One run whose ranks work together.

    Args:
        job: job to do.
        nodes: all nodes, which may take part.
        send: sends a message to a connection.
        clock: seconds.
        journal: journal of the run.
        checkpoints: checkpoints of its ranks.

    Attributes:
        checkpoints: see above.
        news: events of the run.
        failure: error that ends the run; None if it can go on.
        is_complete: whether all is done.
        weights: resulting weights; a safetensors file, empty before the end.
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
        self.weights: bytes | memoryview = b""
        self._bringing, self._bringing_bytes = "", 0
        self._no_room_since: float | None = None
        self._values, self._starter = SharedValues(), RemoteStarter(job.run, nodes, send)
        self._table = RankTable(self._starter, journal)
        self._supervisor: RankSupervisor[RemoteRank] | None = None
        self._step_before: Step | None = None
        self._newcomers_from: int | None = None  # step of the last checkpoint when the waiting nodes joined
        self._next_nodes: tuple[str, ...] | None = None  # that take over when the ranks have stopped
        self._ending = RunEnding(nodes.patience)
        self._absences = Absences(nodes)
        self._rejected = RejectedNodes(job.run)

    def resume(self, state: JournalState) -> None:
        """Continue the run of a master that was killed; its nodes have time to come back."""
        roster = state.roster
        self.note("master restarted", "the master continues the run that it had in progress")
        self.news.epochs = {epoch.epoch: epoch for epoch in state.epochs}
        self.checkpoints.last = saved = state.saved or self.checkpoints.last
        self.checkpoints.base = self.job.checkpoint
        began_from = saved.step if self.job.checkpoint == saved.digest else 0
        if not roster.names:  # no process was started yet: the run begins when nodes are ready
            self._beginnings.step = began_from
            self._table.count(roster.next - 1)
            self._next_nodes = state.assigned
            return
        self._starter.secret, self._values = state.begun.secret, self._journaled_values(state.values)
        self._table.resume(roster, self._nodes.record)
        self._beginnings.resume(began_from)
        absence = return_seconds(self._nodes.patience)
        self._absences.excuse_all(self._clock() + absence)
        self._supervisor = self._govern_ranks(0)
        self._supervisor.resume(roster.generation, roster.numbers, roster.given_up, roster.next, absence)
        if state.assigned is not None:
            self.pause(state.assigned)

    def admit(self, node: NodeRecord) -> None:
        """Let a member prepare."""
        if self.job.run not in node.left_out_of:
            node.doing = "prepares"
            self._send(node.peer, PrepareRank(run=self.job.run), [encode_rank_part(self.job)])

    def ready(self, node: NodeRecord, header: RankReady) -> None:
        """Note that a node has the code; it may have reconnected, with its process or without it."""
        node.ready_for, self._starter.speeds[node.name] = self.job.run, header.speed
        self._beginnings.ready(self._clock())
        self._absences.is_back(node.name)
        rank = self._table.on(node.name)
        node.doing = "waits for the other nodes to prepare" if rank is None else f"runs process {rank.number}"
        if rank is None or rank.has_ended or node.peer == rank.peer:
            return
        rank.peer, rank.is_unwanted = node.peer, False
        if header.process != rank.number:
            rank.lost = "reconnected after its process had died"
        elif self._ending.reason is not None:
            rank.request_stop(at_once=False)  # the first request may have been lost with the connection

    def not_ready(
        self, node: NodeRecord, reason: str, error: EvenerError | None = None, *, is_new: bool = True
    ) -> None:
        """Continue without a node that cannot take part; record an event if the reason `is_new`."""
        node.leave_out(self.job.run, reason, error)
        self._table.lose(node.name, f"cannot take part: {reason}")
        if is_new:
            self.note("left out", f"node {node.name} cannot take part: {reason}", node.name)

    def lose(self, node: NodeRecord, reason: str, *, is_silent: bool = False) -> None:
        """Continue without a node that is no longer a member; `reason` is a clause, as "it has been silent for 6 s".

        If a silent node has the last process that holds the state, it is waited for as long as the coordinator waits.
        """
        self.checkpoints.disconnected(node)
        last = self._table.on(node.name)
        if is_silent and last is not None and self._supervisor is not None and self._supervisor.is_last_holder(last):
            self._absences.excuse_node(node.name)
            return
        if (rank := self._table.lose(node.name, reason.removeprefix("it "))) is not None:  # its name comes before it
            rank.request_stop(at_once=True)

    def retire(self, node: NodeRecord) -> None:
        """Let the rank of a node go after a step, if the others can continue without it."""
        if (rank := self._table.on(node.name)) is not None and self._supervisor is not None:
            self._supervisor.release(rank)
            self._rejected.ask_all()
            if self._may_have_trained and not self._supervisor.has_generation and not rank.has_ended:
                reason = "the run cannot continue without a node, so this one is lost after its time"
                self.note("leaving", f"node {node.name} is about to leave; {reason}", node.name)

    def is_free(self, node: NodeRecord) -> bool:
        """Return whether the ranks need no process of this node."""
        rank = self._table.on(node.name)
        return rank is None or rank.has_ended or self._supervisor is None or self._supervisor.is_lost(rank)

    def said(self, node: NodeRecord, process: int, data: bytes) -> None:
        """Handle a message of a process. Raises msgspec.DecodeError, InvalidInput: the message is not valid."""
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
        """Take the events of a process. Raises msgspec.DecodeError."""
        if self._may_speak(node, process):
            known = len(self.news.epochs)
            self.news.add(sized_events(data, MAX_EVENT_BYTES))
            for epoch in list(self.news.epochs.values())[known:]:
                self._journal.add(ReportedEpoch(epoch=epoch))

    def saved(self, node: NodeRecord, header: RankSaved) -> None:
        """Fetch a checkpoint that a process has written."""
        if self._may_speak(node, header.process):
            self.checkpoints.offered(node, header)

    def ended(self, node: NodeRecord, header: RankEnded, weights: Sequence[memoryview]) -> None:
        """Note that a process has ended."""
        rank = self._table.of(node, header.process)
        if rank is None or rank.ended is not None:
            return
        rank.ended = header
        error = None if rank.failure is None else rank.failure.error
        if isinstance(error, LineCut):
            is_new = self._rejected.add_cut(node, header.sentence, self._clock())
            self.not_ready(node, header.sentence, is_new=is_new)
        elif isinstance(error, NotNeeded):
            self._rejected.add(node)
            self.not_ready(node, header.sentence)
        if weights:
            self.weights, self._bringing_bytes = weights[0], 0
        self._values.forget(rank.number)
        self._govern()

    @property
    def num_updates(self) -> int:
        """Number of updates so far."""
        return self.news.step.step if self.news.step is not None else 0

    @property
    def held_bytes(self) -> int:
        """Memory of the weights that have arrived, or are arriving."""
        return len(self.weights) + self._bringing_bytes

    def wants_weights(self, node: NodeRecord, process: int, num_bytes: int, room: int) -> bool:
        """Return whether an ended process may send weights: one at a time, until they have arrived.

        If they need more than `room` bytes for `_ROOM_SECONDS`, the run ends.

        Raises:
            BadFrame: there is no room now; the node sends them again.
        """
        rank = self._table.of(node, process)
        if rank is None or rank.ended is not None or self.weights or self._bringing not in ("", node.name):
            return False
        if num_bytes > room and self._may_speak(node, process):
            what = f"the resulting weights need {num_bytes} bytes, and the master's memory has room for {room}"
            self._no_room_since = self._clock() if self._no_room_since is None else self._no_room_since
            if self._clock() - self._no_room_since <= _ROOM_SECONDS:
                raise BadFrame(what)
            self.failure = self.failure or DoesNotFit(f"{what}: start the master where more memory is free")
        if num_bytes > room:
            return False
        self._bringing, self._bringing_bytes = node.name, num_bytes
        return True

    def wants(self, node: NodeRecord, process: int, num_bytes: int) -> bool:
        """Return whether a process may send a message of this length."""
        return self._table.of(node, process) is not None and (
            num_bytes <= MAX_MESSAGE_BYTES or (not self.news.has_record and self._may_speak(node, process))
        )

    def disconnected(self, node: NodeRecord) -> None:
        """Forget what was arriving over a node's connection."""
        if self._bringing == node.name:
            self._bringing, self._bringing_bytes = "", 0

    def note(self, kind: str, message: str, *nodes: str) -> None:
        """Add an event about `nodes`; a node that joins is reported by its generation instead."""
        if kind != "joined":
            self.news.note(kind, message, nodes)

    def stop(self, error: EvenerError, *, at_once: bool = False) -> None:
        """End the run because of `error`; unless `at_once`, ranks that have begun finish their step."""
        if self._next_nodes is not None:  # the ranks stop already
            self._next_nodes, self._ending = None, RunEnding(self._nodes.patience)
        self._stop_ranks(error, at_once=at_once)

    def _stop_ranks(self, error: EvenerError, *, at_once: bool) -> None:
        working = [rank for rank in self._table.ranks if not rank.has_ended]  # one that is not needed may have ended
        if self._ending.stop(error, working, self._clock(), at_once=at_once):
            if self._supervisor is not None:
                self._supervisor.is_stopping = True
            self._table.request_stop(at_once=False)

    def pause(self, names: tuple[str, ...]) -> None:
        """Stop the ranks, with a checkpoint, from which the nodes `names` go on; see `has_paused`."""
        if self._next_nodes is None:
            if self._ending.reason is not None:
                return  # it ends
            if self._supervisor is not None:
                self._stop_ranks(Interrupted("other nodes are assigned to the run"), at_once=False)
        self._next_nodes = names
        self._journal.add(Assigned(nodes=names))

    @property
    def claimed_nodes(self) -> tuple[str, ...] | None:
        """Names of the nodes that work for the run, or take over when they have stopped; None: all nodes."""
        return None if self.job.nodes is None else tuple({*self.job.nodes, *(self._next_nodes or ())})

    @property
    def has_paused(self) -> bool:
        """Whether the ranks have stopped for other nodes to go on: the master calls `go_on`."""
        return self._next_nodes is not None and self._supervisor is None

    def go_on(self) -> None:
        """Begin with the assigned nodes, from the last checkpoint, when they are ready."""
        assert self._next_nodes is not None
        digest = self.checkpoints.begin_from_last()
        self.job, self._next_nodes = replace(self.job, nodes=self._next_nodes, checkpoint=digest), None
        self._beginnings = Beginnings(self._nodes, self.job.run)
        self._beginnings.step = self.checkpoints.last.step
        self._rejected = RejectedNodes(self.job.run)
        self._journal.add(RunStart(job=self.job, secret=b""))
        self.checkpoints.drop_previous_base()

    def tick(self) -> None:
        """Do what is due."""
        self.checkpoints.tick()
        if self.has_paused:
            return
        if self._supervisor is None:
            self._gather()
            self.failure = self._ending.reason or self.failure
            return
        self._absences.miss(self._table.ranks, self._clock())
        self._govern()
        if self._supervisor is None:
            return  # it restarts
        self._table.end_given_up(self._supervisor)
        is_alone = self._is_on_one_node
        self._rejected.ask_again(
            self._clock(), is_computing=is_alone or self._supervisor.is_computing, restarts=is_alone
        )
        if self._supervisor.has_generation and self._ending.reason is None:
            for _ in self._starter.take_new():
                self._supervisor.add_node()
        self._see_end()
        self._admit_at_checkpoint()

    def close(self) -> None:
        """End all processes."""
        self._table.request_stop(at_once=True)

    def _gather(self) -> None:
        """Begin if enough nodes are ready."""
        try:
            if initial_nodes := self._beginnings.initial_nodes(self._present, self._clock()):
                self._begin(initial_nodes)
        except (NoUsableNode, InvalidInput, DoesNotFit) as error:
            self.failure = error

    def _begin(self, nodes: Sequence[NodeRecord]) -> None:
        """Start a process on each of the nodes."""
        self._beginnings.begins()
        self._values, self._starter.secret = self._journaled_values({}), secrets.token_bytes(SECRET_BYTES)
        self._journal.add(RunStart(job=self.job, secret=self._starter.secret))
        self._supervisor = self._govern_ranks(self._table.begin(nodes))
        self._write(None)
        self.checkpoints.drop_previous_base()  # a master that is killed before restarts from the previous base

    def _journaled_values(self, initial: Mapping[str, bytes]) -> SharedValues:
        return SharedValues(lambda key, value: self._journal.add(StoredValue(key=key, value=value)), initial)

    def _govern_ranks(self, first: int) -> RankSupervisor[RemoteRank]:
        return RankSupervisor(
            self._table.ranks,
            self._nodes.patience,
            self._start_late,
            can_start=self._starter.can_start,
            first=first,
            keep=self._write,
            advice="",  # it restarts by itself, if it can
            notify=self.note,
        )

    def _write(self, generation: Generation | None) -> None:
        """Save the processes of the nodes, and the generation."""
        if generation is not None:
            self._rejected.changed(generation)
        self._table.write(generation, self._supervisor)

    def _start_late(self, rank: int, number: int) -> RemoteRank:
        self._table.count(number)
        self._write(None if self._supervisor is None else self._supervisor.generation)
        return self._starter.start(rank, number, is_late=True)

    def _may_speak(self, node: NodeRecord, process: int) -> bool:
        """Return whether a process takes part, so that its messages count."""
        rank = self._table.of(node, process)
        return rank is not None and self._supervisor is not None and self._supervisor.may_speak(rank)

    @property
    def _present(self) -> list[NodeRecord]:
        """Connected nodes that work for the run."""
        return [node for node in self._nodes.present if self.job.takes(node.name)]

    def _govern(self) -> None:
        if self._supervisor is not None and self.failure is None and not self.is_complete:
            try:
                self._supervisor.tick()
                if not self._table.is_written:
                    self._write(self._supervisor.generation)
            except NodeLost as error:
                self._end_by(error)

    def _see_end(self) -> None:
        """End the run if it is over."""
        supervisor = self._supervisor
        if (
            supervisor is None
            or self.failure is not None
            or not self._ending.is_over(supervisor, self._table.ranks, self._clock())
        ):
            return
        error = self._ending.error(supervisor, self._table.ranks, has_record=self.news.has_record)
        if error is None or (self._next_nodes is not None and self.news.has_record and self.weights):
            self.is_complete = True
        else:
            self._end_by(error)

    @property
    def _may_have_trained(self) -> bool:
        """Whether the ranks may have made a step since the run last began, perhaps under another master."""
        has_trained = self._supervisor is not None and self._supervisor.has_trained
        is_saved = self.checkpoints.last.step > self._beginnings.step
        return self.news.step is not self._step_before or has_trained or is_saved

    @property
    def _is_on_one_node(self) -> bool:
        """Whether the run trains on the one node that it began on."""
        supervisor = self._supervisor
        return (
            supervisor is not None
            and not supervisor.has_generation
            and len(self._table.ranks) == 1
            and self._may_have_trained
        )

    def _admit_at_checkpoint(self) -> None:
        """Restart from the next checkpoint if nodes have joined a run that began on one node.

        Such a run cannot make room for them: it has not measured or checked anything about several nodes.
        """
        saved = self.checkpoints.last
        new = (
            self._starter.waiting()
            if self._is_on_one_node and self._ending.reason is None and self.failure is None
            else []
        )
        if not new or self.is_complete:
            self._newcomers_from = None
            return
        if self._newcomers_from is None:
            self._newcomers_from = saved.step
            for node in new:
                node.doing = "waits for the next checkpoint"
                reason = f"node {node.name} takes part after the next checkpoint, since the run began on one node"
                self.note("waiting", reason, node.name)
        elif saved.step > self._newcomers_from and (
            reason := self._beginnings.from_checkpoint(saved.step, 1 + len(new))
        ):
            self._begin_again(f"{reason} {', '.join(node.name for node in new)} came", from_checkpoint=True)

    def _begin_again(self, why: str, *, from_checkpoint: bool) -> None:
        """End all processes, and restart with the nodes that are ready."""
        self.note("begins again", why)
        self._clear()
        if from_checkpoint:
            self.job = replace(self.job, checkpoint=self.checkpoints.begin_from_last())
            for node in self._present:
                node.ready_for = ""
                self.admit(node)

    def _clear(self) -> None:
        """End all processes."""
        self.close()
        self.news.forget_record()
        self._ending.begins_again()
        self._supervisor = self._newcomers_from = None
        self._table.clear()
        self._step_before = self.news.step
        self.weights, self._bringing, self._bringing_bytes = b"", "", 0

    def _end_by(self, error: EvenerError) -> None:
        """Restart the run if nodes were lost and a restart is allowed; else end it with `error`.

        Ranks that have stopped for other nodes are awaited until the master has their checkpoint.
        """
        if self._next_nodes is not None and isinstance(error, Interrupted | NodeLost):
            if not self.checkpoints.is_coming:
                self._clear()
                self._ending = RunEnding(self._nodes.patience)
            return
        may_have_trained, saved, nodes = self._may_have_trained, self.checkpoints.last, self._usable_nodes()
        began_from = self._beginnings.step
        reason = self._beginnings.again(
            error,
            saved.step,
            self._clock(),
            may_have_trained=may_have_trained,
            before=len(self._table.ranks),
            able=len(nodes),
        )
        if not reason and not may_have_trained:
            reason = self._exclude_lost(error, nodes)
        if not reason or self._ending.reason is not None:
            self.failure = error if may_have_trained else self._beginnings.explained(error)
            return
        self._begin_again(f"{reason} {error}", from_checkpoint=self._beginnings.step != began_from)

    def _usable_nodes(self) -> list[NodeRecord]:
        """Return the nodes of the ranks, without those that cannot take part."""
        nodes = [self._nodes.record(rank.node) for rank in self._table.ranks]
        return [node for node in nodes if self.job.run not in node.left_out_of]

    def _exclude_lost(self, error: EvenerError, nodes: Sequence[NodeRecord]) -> str:
        """Leave out the nodes that `error` names, if others can begin; return a clause that says from where."""
        names = error.nodes if isinstance(error, NodeLost) else ()
        lost = [node for node in nodes if node.name in names]
        if not lost or self._ending.reason is not None:
            return ""
        present = [node for node in self._present if self.job.run not in node.left_out_of]
        others = {node.name for node in (*nodes, *present)}.difference(names)
        reason = self._beginnings.without(error, self._clock(), len(others))
        for node in lost if reason else ():
            sentence = "it was lost before the first step, which the run has tried three times"
            self.not_ready(node, sentence, is_new=self._rejected.add_cut(node, sentence, self._clock()))
        return reason
