"""The master's runs: it takes them in, has nodes work for them, and keeps their results.

A run takes all nodes, or those that the command chose; runs on different nodes go on side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from evener.agreements.parameter_server import ParameterServer
from evener.agreements.run_memory import run_memory
from evener.agreements.threads import ThreadPool
from evener.ps.master.access.audit import AuditLog, trace_of
from evener.ps.master.active_run import ActiveRun, RunStore
from evener.ps.master.checkpointing import Checkpointer, unfinished
from evener.ps.master.finished_runs import FinishedRuns
from evener.ps.master.lease_run import ActiveLeaseRun
from evener.ps.master.lease_training import LeaseTraining
from evener.ps.master.merges import merge_of
from evener.ps.master.node_state import NodeEvent
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.piece_holders import PieceHolders
from evener.ps.master.ranks.rank_journal import RankJournal, RunStart, unfinished_ranks
from evener.ps.master.ranks.rank_run import ActiveRankRun
from evener.ps.master.ranks.rank_training import RankTraining
from evener.ps.master.validation import EpochEnd
from evener.ps.protocol.blob_stream import why_no_disk
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.job import MAX_JOBS_BYTES, AnyJob, Job, Submission, Submissions, encode_job, exclude_each_other
from evener.ps.protocol.messages import (
    AssignNodes,
    FetchBlob,
    Ready,
    RunAccepted,
    RunFinished,
    RunRejected,
    Send,
)
from evener.ps.protocol.rank_messages import RankJob
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError, explain, first_line
from evener.records.history import History
from evener.records.schema import shown
from evener.system.memory import usable_memory
from evener.wire.frame import Buffer

MAX_RUNS = 64
"""Runs in progress at once: their weights lie in the master's memory."""
MEMORY_SHARE = 0.75
"""Share of the memory that is usable when a master starts, for the weights of all runs and what belongs to them."""
_MORE_LEASES = 2**32
"""More than a master gives out after its last checkpoint: the next master recognises older leases as late."""


class Scheduler:
    """All runs of a master; close it.

    Args:
        config: of the master.
        nodes: all nodes of the master.
        send: sends a message to a connection.

    Attributes:
        audit: the log of who did what.
        submissions: the run that is being submitted.
        holders: the nodes that serve pieces of blobs.
        trainings: the runs in progress whose nodes work on leases, in the order in which they began.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send) -> None:
        self._config, self._nodes, self._send = config, nodes, send
        self._home, self._clock, self._notify = config.home, config.clock, config.notify
        self._memory_bytes = int(MEMORY_SHARE * usable_memory()[1])
        self.submissions = Submissions(
            self._home.blobs,
            send,
            config.clock,
            self._why_not,
            lambda: min(usable_memory()[1] // 2, self._measured_room()),
        )
        self._finished = FinishedRuns(self._home.runs, send)
        self._blobs, self.holders = BlobSender(self._home.blobs), PieceHolders()
        self.audit = AuditLog(config.home.audit, config.notify, clock=config.clock)
        self._cores = ThreadPool()
        self._active: dict[str, ActiveRun] = {}
        self.trainings: list[LeaseTraining] = []

    @property
    def runs(self) -> list[ActiveRun]:
        """The runs in progress, in the order in which they began."""
        return list(self._active.values())

    def _measured_room(self) -> int:
        """Return the bytes that runs in progress, and results that commands have not taken, leave free.

        The limit is measured again while nothing is held: other programs of the machine may have ended.
        """
        held = sum(run.held_bytes for run in self._active.values()) + self._finished.num_bytes
        free = int(MEMORY_SHARE * usable_memory()[1])
        if not held:
            self._memory_bytes = free
        return max(0, min(self._memory_bytes - held, free))

    @property
    def free_bytes(self) -> int:
        """Memory that is free for what nodes send and commands ask for: not for the run that is being submitted."""
        return max(0, self._measured_room() - self.submissions.num_bytes)

    def training_of(self, node: NodeRecord) -> LeaseTraining | None:
        """Return the run for which a node works on leases, or will when it is ready; None if there is none."""
        for run in self.trainings:  # called for every piece of a contribution
            if run.job.nodes is None or node.name in run.job.nodes:
                return run
        return None

    def ranks_of(self, run: str) -> RankTraining | None:
        """Return the run of this name, if it is in progress and its ranks work together."""
        return active.training if isinstance(active := self._active.get(run), ActiveRankRun) else None

    def run_of(self, node: NodeRecord) -> ActiveRun | None:
        """Return the run for which a node works, or will when it is ready; None if there is none."""
        return next((run for run in self._active.values() if run.job.takes(node.name)), None)

    def resume(self) -> None:
        """Continue the runs that the last master of this state folder had in progress."""
        for name in unfinished_ranks(self._home):
            journal = RankJournal(self._home, name, self._notify)
            with self._guarding_files(f"run {name}", journal):
                self._resume_ranks(journal)
        for name in unfinished(self._home):
            checkpointer = Checkpointer(self._config, name)
            with self._guarding_files(f"run {name}", checkpointer):
                self._resume_leases(checkpointer)

    def _resume_ranks(self, journal: RankJournal) -> None:
        if (state := journal.load()) is None:
            journal.close()
            return
        run = ActiveRankRun(self._config, self._nodes, self._send, state.begun.job, journal)
        run.training.resume(state)
        self._add(run, ())
        self._notify(f"continuing run {run.name}, whose ranks work together")

    def _resume_leases(self, checkpointer: Checkpointer) -> None:
        checkpoint, snapshot = checkpointer.load()
        number = snapshot.state.last_number + _MORE_LEASES
        merge = merge_of(snapshot.state.agreement, self._notify)
        server = ParameterServer.resume(snapshot, first_number=number, cores=self._cores, merge=merge)
        self._nodes.resume(checkpoint.nodes, self._clock())
        training = LeaseTraining(
            checkpoint.job, server, checkpoint.history, self._nodes, self._send, self._clock, lambda: self.free_bytes
        )
        due = [EpochEnd(epoch, version, snapshot.ends[epoch]) for epoch, version in checkpoint.due.items()]
        training.resume(checkpoint.used, due, checkpoint.seconds, checkpoint.waited)
        self._add(ActiveLeaseRun(self._config, self._nodes, self._send, training, checkpointer), ())
        self._notify(f"continuing run {checkpoint.job.run} from update {server.version}")

    def submit(self, peer: int, buffers: Sequence[memoryview], submitter: str) -> None:
        """Take in a run that the connection `peer` of `submitter` asks for."""
        if (submission := self.submissions.submit(peer, buffers, submitter)) is not None:
            self.begin(submission)

    def begin(self, submission: Submission) -> None:
        """Begin a submitted run whose code and data have arrived, or reject it."""
        if reason := self._why_not(submission.job):
            self._send(submission.peer, RunRejected(reason=shown(reason)))
            return
        run = self._new_run(submission)
        try:
            self._add(run, (submission.peer,))
        except OSError as error:
            with suppress(OSError):  # on such a disk there may be nothing to remove
                run.store.forget()
            run.free()
            self._send(submission.peer, RunRejected(reason=shown(f"run {run.name} cannot begin: {explain(error)[0]}")))
            return
        self._send(submission.peer, RunAccepted(run=run.name))
        self._notify(f"run {run.name} begins{': its ranks work together' if isinstance(run, ActiveRankRun) else ''}")
        for node in run.present:
            self.admit(node)

    def fetch(self, peer: int, fetch: FetchBlob) -> None:
        """Send a node the piece of a blob that it asks for, or say which node has it."""
        if (where := self.holders.holder(peer, fetch, self._blobs.num_bytes(fetch.digest))) is not None:
            self._send(peer, where)
            return
        chunk, data = self._blobs.chunk(fetch)
        self._send(peer, chunk, (data,))

    def watch(self, peer: int, name: str) -> None:
        """Send the connection `peer` the events of a run or, if the run is over, its result."""
        if (run := self._active.get(name)) is not None:
            run.watch(peer)
        else:
            self._finished.ask(peer, name)

    def training_failed(self, training: LeaseTraining, error: Exception) -> None:
        """Set aside the run of `training` because of an error at the master, unless that has happened already."""
        if (run := self._active.get(training.job.run)) is not None:
            self.set_aside(run, error)

    def owner_of(self, name: str) -> str | None:
        """Return the submitter of a run in progress; None if there is no run of this name."""
        return run.job.submitter if (run := self._active.get(name)) is not None else None

    def stop(self, name: str, *, at_once: bool = False) -> None:
        """End a run at the user's request, after its step or at once."""
        if (run := self._active.get(name)) is not None:
            with self.guarding(run):
                run.stop(at_once=at_once)
                self._end_if_over(run)

    def assign(self, peer: int, wanted: AssignNodes) -> None:
        """Assign other nodes to a run, as the connection `peer` asks."""
        run = self._active.get(wanted.run)
        if reason := self._why_not_assigned(run, wanted):
            self._send(peer, RunRejected(reason=shown(reason), run=wanted.run))
            return
        assert run is not None
        with self.guarding(run):
            run.assign(wanted.nodes)
            self._send(peer, RunAccepted(run=wanted.run))
            return
        self._send(peer, RunRejected(reason=f"run {wanted.run} was set aside", run=wanted.run))

    def _why_not_assigned(self, run: ActiveRun | None, wanted: AssignNodes) -> str:
        if run is None:
            return f"there is no run {wanted.run} in progress"
        if run.job.nodes is None:
            return f"run {wanted.run} uses all nodes"
        others = [other for other in self.runs if other is not run]
        return self._why_not(replace(run.job, nodes=wanted.nodes), among=others)

    def is_watching(self, peer: int) -> bool:
        """Return whether the connection `peer` watches a run, or is submitting one."""
        if self.submissions.is_of(peer) or self._finished.is_awaited_by(peer):
            return True
        return any(peer in run.subscribers for run in self._active.values())

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        self.submissions.disconnected(peer)
        self._finished.disconnected(peer)
        node = self._nodes.at(peer)
        for run in self._active.values():
            if node is not None:
                run.disconnected(node)
            if run.subscribers.remove(peer):
                self._notify(f"the command that watched run {run.name} has disconnected; the run continues")

    def admit(self, node: NodeRecord) -> None:
        """Give work to a node that has become a member, or is one again."""
        if node.profile is not None and (run := self.run_of(node)) is not None:
            with self.guarding(run):
                if node.can_work or not run.is_free(node):  # one that leaves is sent again what it works on
                    run.admit(node)

    def retire(self, node: NodeRecord) -> None:
        """Give a node nothing new, because it is about to leave."""
        if (run := self.run_of(node)) is not None:
            with self.guarding(run):
                run.retire(node)

    def is_free(self, node: NodeRecord) -> bool:
        """Return whether no run waits for anything that a node works on."""
        return (run := self.run_of(node)) is None or run.is_free(node)

    def follow(self, kind: NodeEvent, reason: str, node: NodeRecord, *, is_lost: bool) -> None:
        """Record an event of a node in its run; if the node is lost, the run continues without it."""
        if (run := self.run_of(node)) is not None:
            with self.guarding(run):
                run.follow(kind, reason, node, is_lost=is_lost)

    def ready(self, node: NodeRecord, header: Ready) -> None:
        """Note that a node has model and data of a run."""
        if (run := self.training_of(node)) is None or run.job.run != header.run:
            return
        if node.can_work:
            run.ready(node, header.unit_seconds, header.fixed_samples)
        else:
            node.ready_for = header.run

    def not_ready(self, node: NodeRecord, name: str, reason: str, error: EvenerError | None) -> None:
        """Continue a run without a node that cannot take part in it, because of `error` if one was raised there."""
        if (run := self.run_of(node)) is not None and run.name == name:
            with self.guarding(run):
                run.reject(node, reason, error)

    def tick(self, now: float, is_delivering: Callable[[int], bool]) -> None:
        """Do what is due in every run.

        Args:
            now: seconds.
            is_delivering: whether a message is on its way to a connection and makes progress.
        """
        for run in self.runs:
            with self.guarding(run):
                run.tick(now, is_delivering)
                self._end_if_over(run)
        self._finished.tick(lambda: self.free_bytes)

    def end(self, error: EvenerError) -> None:
        """End all runs because of `error`."""
        for run in self.runs:
            with self.guarding(run):
                self._end(run, error)

    def _end_if_over(self, run: ActiveRun) -> None:
        if run.is_over:
            self._end(run, run.failure)

    def _end(self, run: ActiveRun, error: EvenerError | None) -> None:
        """Save what a run has produced, tell its subscribers, and release its nodes."""
        header, result, where = run.conclude(error)
        buffers = () if result is None else self._finished.share(header, result.record, result.weights)
        self._release(run, header, buffers)
        self._notify(f"run {run.name} is over{f': {error}' if error else ''}; {where}")

    @contextmanager
    def guarding(self, run: ActiveRun) -> Iterator[None]:
        """Set the run aside if an error of the master is raised inside; the master continues without the run."""
        try:
            yield
        except Exception as error:
            self.set_aside(run, error)

    def set_aside(self, run: ActiveRun, error: Exception) -> None:
        """Stop a run because of an error at the master, move its files aside, and tell its subscribers."""
        sentence = self._set_files_aside(f"run {run.name}", run.store, error)
        self._release(run, RunFinished(kind=kind_of(EvenerError(sentence)), reason=sentence, run=run.name), ())

    @contextmanager
    def _guarding_files(self, run: str, store: RunStore) -> Iterator[None]:
        """Move a run's files aside if it cannot be continued."""
        try:
            yield
        except Exception as error:
            self._set_files_aside(run, store, error)
            store.close()

    def _set_files_aside(self, run: str, store: RunStore, error: Exception) -> str:
        self.audit.write("run set aside", detail=trace_of(error))
        sentence = shown(f"{run} cannot be continued ({type(error).__name__}: {first_line(error)})")
        self._notify(f"warning: {sentence}; {store.set_aside()}")
        return sentence

    def _release(self, run: ActiveRun, header: RunFinished, buffers: Sequence[Buffer]) -> None:
        self._active.pop(run.name, None)
        self.trainings = [other.training for other in self.runs if isinstance(other, ActiveLeaseRun)]
        run.release(header, buffers)
        run.free()

    def close(self) -> None:
        """Write the runs in progress to the disk, and end threads."""
        for run in self._active.values():
            run.close()
        self.submissions.close()
        self._finished.close()
        self._cores.close()

    def _new_run(self, submission: Submission) -> ActiveRun:
        job = replace(submission.job, run=self._home.free_name(submission.job.run))
        if isinstance(job, RankJob):
            journal = RankJournal(self._home, job.run, self._notify)
            journal.add(RunStart(job=job, secret=b""))
            return ActiveRankRun(self._config, self._nodes, self._send, job, journal)
        assert submission.weights is not None
        first, merge = time.time_ns(), merge_of(job.agreement, self._notify)
        server = ParameterServer(
            job.agreement, job.workload, submission.weights, cores=self._cores, first_number=first, merge=merge
        )
        training = LeaseTraining(job, server, History(), self._nodes, self._send, self._clock, lambda: self.free_bytes)
        training.submitted = submission.submitted
        return ActiveLeaseRun(self._config, self._nodes, self._send, training, Checkpointer(self._config, job.run))

    def _add(self, run: ActiveRun, watchers: Sequence[int]) -> None:
        run.begin(watchers)  # a run whose log cannot be opened is not added
        self._active[run.name] = run
        if isinstance(run, ActiveLeaseRun):
            self.trainings.append(run.training)

    def _why_not(self, job: AnyJob, among: Sequence[ActiveRun] | None = None) -> str:
        """Say why a run cannot begin beside those in progress; empty if it can."""
        others = self.runs if among is None else among
        if len(others) >= MAX_RUNS:
            return f"the master has {MAX_RUNS} runs in progress, which is the limit: end one with `evener stop`"
        if among is None and (reason := self._why_no_room(job)):
            return reason
        busy = next((run for run in others if exclude_each_other(run.claim, job)), None)
        if busy is None:
            return ""
        status = busy.status
        return (
            f"the master is busy with run {status.run}, {status.version} updates so far: wait for it (`evener nodes` "
            f"shows it, its results will be in {status.folder}), or end it with `evener stop`"
        )

    def _why_no_room(self, job: AnyJob) -> str:
        """Say why memory or disk have no room for another run; empty if they do."""
        jobs = [one for one in (job, *(run.job for run in self.runs)) if isinstance(one, Job)]
        if sum(len(encode_job(one)) for one in jobs) > MAX_JOBS_BYTES:
            return f"the descriptions of all runs would take more than {MAX_JOBS_BYTES} bytes, which is the limit"
        needed = sum(run_memory(job.agreement, job.layout)) if isinstance(job, Job) else 0
        if needed > (room := self._measured_room()):
            return f"the run needs {needed} bytes of the master's memory, and {room} are free: wait until others end"
        return why_no_disk(self._home.folder)
