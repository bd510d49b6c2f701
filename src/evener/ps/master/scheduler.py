"""The master's dealings with runs: takes them in, has them done by the nodes, and keeps their results.

A run is done by all nodes, or by some that the command chose; several of these go on side by side, each on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from evener.ps.master.access.audit import AuditLog, trace_of
from evener.ps.master.active_run import ActiveRun
from evener.ps.master.checkpointing import Checkpointer, unfinished
from evener.ps.master.merges import merge_of
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.rank_scheduler import RankScheduler
from evener.ps.master.run_status import busy_with, set_aside_sentence, status_of
from evener.ps.master.training_run import TrainingRun, run_of
from evener.ps.master.validation import EpochEnd
from evener.ps.protocol.blob_stream import why_no_disk
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.job import MOST_JOBS_BYTES, Job, Submission, Submissions, encode_job
from evener.ps.protocol.messages import (
    AssignNodes,
    BlobChunk,
    FetchBlob,
    RunAccepted,
    RunFinished,
    RunRejected,
    Send,
    StopRun,
)
from evener.ps.protocol.run_result import load_result
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError, Interrupted
from evener.records.history import History
from evener.records.schema import shown
from evener.sync.parameter_server import ParameterServer
from evener.sync.threads import ThreadPool
from evener.system.memory import usable_memory

MOST_RUNS = 64
"""At once: their weights lie in the master's memory."""
RANKS = ""
"""No run's name: stands for the run whose ranks work together."""
_MORE_LEASES = 2**32
"""Than any master gives from its last snapshot to its end: what was begun for it is recognised as late."""


class Scheduler:
    """All that a master does for runs; close it.

    Args:
        config: of the master.
        nodes: those who may work.
        send: to connections.

    Attributes:
        audit: where is written who did what.
        runs: in progress, in the order in which they began.
        ranks: of a run whose ranks work together; there is no other run beside it.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send) -> None:
        self._config, self._nodes, self._send = config, nodes, send
        self._home, self._clock, self._notify = config.home, config.clock, config.notify
        self._submissions = Submissions(self._home.blobs, send, config.clock, self._why_not)
        self._blobs = BlobSender(self._home.blobs)
        self.audit = AuditLog(config.home.audit, config.notify)
        self._cores = ThreadPool()
        self._active: dict[str, ActiveRun] = {}
        self.runs: list[TrainingRun] = []
        self.ranks = RankScheduler(config, nodes, send, lambda: self._busy_with(next(iter(self.runs), None)))

    def resume(self) -> None:
        """Go on with the runs that the last master of this home had in progress."""
        with self.guarding(RANKS):
            self.ranks.resume()
        for run in unfinished(self._home):
            with self.guarding(run):
                self._resume(run)

    def _resume(self, run: str) -> None:
        checkpointer = Checkpointer(self._config, run)
        checkpoint, snapshot = checkpointer.load()
        number = snapshot.state.last_number + _MORE_LEASES
        merge = merge_of(snapshot.state.agreement)
        server = ParameterServer.resume(snapshot, first_number=number, cores=self._cores, merge=merge)
        self._nodes.resume(checkpoint.nodes, self._clock())
        history = checkpoint.history
        training = TrainingRun(checkpoint.job, server, history, self._nodes, self._send, self._clock)
        due = [EpochEnd(epoch, version, snapshot.ends[epoch]) for epoch, version in checkpoint.due.items()]
        training.resume(checkpoint.used, due, checkpoint.seconds, checkpoint.waited)
        self._add(training, checkpointer, ())
        self._notify(f"going on with run {checkpoint.job.run} from update {server.version}")

    def wants_submission(self, peer: int, lengths: Sequence[int]) -> bool:
        """Whether a run may come now in buffers of these lengths. Raises BadFrame: no run has such."""
        return self._submissions.wants(peer, lengths)

    def submit(self, peer: int, buffers: Sequence[memoryview], submitter: str) -> None:
        """A command of somebody, whose name is known here, wants a run."""
        self._begin(self._submissions.submit(peer, buffers, submitter))

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> None:
        """A piece of a blob came from the command that submits a run."""
        self._begin(self._submissions.chunk(peer, chunk, data))
        self.ranks.chunk(peer, chunk, data)

    def fetch(self, peer: int, fetch: FetchBlob) -> None:
        """A node lacks a piece of a blob."""
        chunk, data = self._blobs.chunk(fetch)
        self._send(peer, chunk, (data,))

    def watch(self, peer: int, run: str) -> None:
        """A command subscribes to a run, or wants its result."""
        if (active := self._active.get(run)) is not None:
            active.subscribers.add(peer, active.training)
            return
        if self.ranks.watch(peer, run):
            return
        try:
            result = load_result(self._home.runs / run)
        except EvenerError as error:
            self._send(peer, RunRejected(reason=shown(f"there is no run {run}: {error}"), run=run))
            return
        header = RunFinished(kind=result.kind, reason=shown(result.reason), run=run)
        self._send(peer, header, (result.record, result.weights))

    def owner_of(self, run: str) -> str | None:
        """Who submitted a run in progress; None if there is none of this name."""
        return self._active[run].training.job.submitter if run in self._active else self.ranks.owner_of(run)

    def stop(self, stop: StopRun) -> None:
        """A command wants a run to end."""
        with self.guarding(RANKS):
            self.ranks.stop(stop.run)
        if (active := self._active.get(stop.run)) is not None:
            with self.guarding(stop.run):
                self._end(active, Interrupted(f"stopped after update {active.training.server.version} as asked"))

    def assign(self, peer: int, wanted: AssignNodes) -> None:
        """A command wants other nodes to work for a run."""
        reason = self._why_not_assigned(wanted)
        if reason:
            self._send(peer, RunRejected(reason=shown(reason), run=wanted.run))
            return
        with self.guarding(wanted.run):
            self._active[wanted.run].assign(wanted.nodes)
            self._send(peer, RunAccepted(run=wanted.run))
            return
        self._send(peer, RunRejected(reason=f"run {wanted.run} was set aside", run=wanted.run))

    def _why_not_assigned(self, wanted: AssignNodes) -> str:
        if (active := self._active.get(wanted.run)) is None:
            return f"there is no run {wanted.run} in progress"
        if active.training.job.nodes is None:
            return f"run {wanted.run} is for whoever is here"
        others = [run for run in self.runs if run.job.run != wanted.run]
        return self._why_not(replace(active.training.job, nodes=wanted.nodes), among=others)

    def is_watching(self, peer: int) -> bool:
        """Whether a command watches the run, or is submitting one."""
        watches = any(peer in active.subscribers for active in self._active.values())
        return watches or self._submissions.is_of(peer) or self.ranks.is_watching(peer)

    def disconnected(self, peer: int) -> None:
        """A connection is gone."""
        self._submissions.left(peer)
        self.ranks.disconnected(peer)
        for run, active in self._active.items():
            if active.subscribers.remove(peer):
                self._notify(f"the command that watched run {run} is gone; the run goes on")

    def admit(self, node: NodeRecord) -> None:
        """A node is a member, or is one again: give it work."""
        with self.guarding(RANKS):
            self.ranks.admit(node)
        if node.profile is not None and (run := run_of(node, self.runs)) is not None:
            run.admit(node)

    def is_for(self, node: NodeRecord, name: str) -> bool:
        """Whether a node works, or would if it were ready, for the run of this name."""
        run = run_of(node, self.runs)
        return self.ranks.name == name or (run is not None and run.job.run == name)

    def ready(self, node: NodeRecord, name: str, unit_seconds: float) -> None:
        """A node has model and data of a run."""
        if (run := run_of(node, self.runs)) is None or run.job.run != name:
            return
        if node.is_present:
            run.ready(node, unit_seconds)
        else:
            node.ready = name

    def tick(self, now: float, is_delivering: Callable[[int], bool]) -> None:
        """What the time brings to runs: events for subscribers, the late, the end.

        Args:
            now: seconds.
            is_delivering: whether something is on its way to a connection, and gets on.
        """
        with self.guarding(RANKS):
            self.ranks.tick(now)
        for run, active in list(self._active.items()):
            with self.guarding(run):
                if active.tick(now, is_delivering):
                    self._end(active, active.training.failure)

    def end(self, error: EvenerError) -> None:
        """All runs are over."""
        with self.guarding(RANKS):
            self.ranks.end(error)
        for run, active in list(self._active.items()):
            with self.guarding(run):
                self._end(active, error)

    def _end(self, active: ActiveRun, error: EvenerError | None) -> None:
        """A run is over: keep what remains of it, tell those who watch, release the nodes."""
        header, result, where = active.conclude(error)
        self._release(active, header, (result.record, result.weights) if result.record else ())
        active.checkpointer.close()
        self._notify(f"run {header.run} is over{f': {error}' if error else ''}; {where}")

    @contextmanager
    def guarding(self, run: str) -> Iterator[None]:
        """Whatever goes wrong inside, the master is up, and goes on without the run; `RANKS` is one, too."""
        try:
            yield
        except Exception as error:
            self.set_aside(run, error)

    def set_aside(self, run: str, error: Exception) -> None:
        """A run cannot be gone on with, because of something here: keep it apart, say so, go on without it."""
        self.audit.write("run set aside", detail=trace_of(error))
        if run == RANKS:
            self.ranks.set_aside(error)
            return
        sentence = set_aside_sentence(f"run {run}", error)
        active = self._active.get(run)
        checkpointer = active.checkpointer if active else Checkpointer(self._config, run)
        if active is not None:
            self._release(active, RunFinished(kind=kind_of(EvenerError(sentence)), reason=sentence, run=run), ())
        self._notify(f"warning: {sentence}; {checkpointer.set_aside()}")
        checkpointer.close()

    def _release(self, active: ActiveRun, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """Nobody works for a run, or watches it, any more."""
        self._active.pop(active.training.job.run, None)
        self.runs = [one.training for one in self._active.values()]
        active.release(header, buffers)

    def close(self) -> None:
        """Write down the runs in progress and end threads."""
        for active in self._active.values():
            active.close()
        self._submissions.close()
        self.ranks.close()
        self._cores.close()

    def _begin(self, submission: Submission | None) -> None:
        """Begin with a run of which nothing is missing any more."""
        if submission is None:
            return
        assert isinstance(submission.job, Job)
        assert submission.weights is not None
        if reason := self._why_not(submission.job):
            self._send(submission.peer, RunRejected(reason=shown(reason)))
            return
        job = replace(submission.job, run=self._home.free_name(submission.job.run))
        first, merge = time.time_ns(), merge_of(job.agreement)
        server = ParameterServer(
            job.agreement, job.workload, submission.weights, cores=self._cores, first_number=first, merge=merge
        )
        training = TrainingRun(job, server, History(), self._nodes, self._send, self._clock)
        training.submitted = submission.submitted
        active = self._add(training, Checkpointer(self._config, job.run), (submission.peer,))
        self._send(submission.peer, RunAccepted(run=job.run))
        self._notify(f"run {job.run} begins")
        for node in active.present:
            self.admit(node)

    def _add(self, training: TrainingRun, checkpointer: Checkpointer, watchers: Sequence[int]) -> ActiveRun:
        """Another run is in progress."""
        active = ActiveRun(self._config, self._nodes, self._send, training, checkpointer)
        self._active[training.job.run] = active
        self.runs.append(training)
        active.begin(watchers)
        return active

    def _why_not(self, job: Job, among: Sequence[TrainingRun] | None = None) -> str:
        """Why a run cannot begin beside those in progress; empty if it can."""
        others = self.runs if among is None else among
        if len(others) >= MOST_RUNS:
            return f"the master has {MOST_RUNS} runs in progress, which is the limit: end one with `evener stop`"
        if among is None and (reason := self._why_no_room(job)):
            return reason
        excluding = (run for run in others if run.job.excludes(job))
        return self.ranks.busy or self._busy_with(next(excluding, None))

    def _why_no_room(self, job: Job) -> str:
        """Why memory and disk have no room for another run; empty if they do."""
        jobs = [job, *(run.job for run in self.runs)]
        if sum(len(encode_job(one)) for one in jobs) > MOST_JOBS_BYTES:
            return f"the runs in progress would be described by more than {MOST_JOBS_BYTES} bytes, which is the limit"
        if sum(one.layout.num_bytes for one in jobs) > (most := usable_memory()[1] // 2):
            return f"the weights of all runs would take more than the {most} bytes that this master has for them"
        return why_no_disk(self._home.folder)

    def _busy_with(self, run: TrainingRun | None) -> str:
        return "" if run is None else busy_with(status_of(run, self._home.runs))
