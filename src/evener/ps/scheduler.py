"""The master's dealings with runs: takes one in at a time, has it done by the nodes, and keeps its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from evener.errors import EvenerError, Interrupted, first_line
from evener.event_log import EventLog
from evener.event_tail import EVENTS_FILE
from evener.history import History
from evener.ps.blob_transfer import BlobSender
from evener.ps.checkpointing import Checkpointer
from evener.ps.config import MasterConfig
from evener.ps.job import Submission, Submissions
from evener.ps.merges import merge_of
from evener.ps.messages import (
    BlobChunk,
    FetchBlob,
    Release,
    RunAccepted,
    RunFinished,
    RunRejected,
    Send,
    StopRun,
)
from evener.ps.nodes import NodeRecord, Nodes
from evener.ps.results import RunResult, encode_record, load_result, record_of, save_result, weights_of
from evener.ps.subscribers import Subscribers
from evener.ps.training_run import TrainingRun
from evener.schema import shown
from evener.sync.parameter_server import ParameterServer
from evener.sync.threads import ThreadPool

_MORE_LEASES = 2**32
"""Than any master gives between its last snapshot and its end: what was begun for it is recognised as late."""


class Scheduler:
    """All that a master does for runs; close it.

    Args:
        config: of the master.
        nodes: those who may work.
        send: to connections.

    Attributes:
        run: in progress, if there is one.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send) -> None:
        self._config, self._nodes, self._send = config, nodes, send
        self._home, self._clock, self._notify = config.home, config.clock, config.notify
        self._submissions, self._blobs = Submissions(self._home.blobs, send, config.clock), BlobSender(self._home.blobs)
        self._subscribers = Subscribers(nodes, send)
        self._checkpointer = Checkpointer(config)
        self._cores = ThreadPool()
        self.run: TrainingRun | None = None

    def resume(self) -> None:
        """Go on with the run that the last master of this home had in progress, if there was one.

        Raises:
            InvalidFile: nothing that was written down of it is whole.
        """
        found = self._checkpointer.load()
        if found is None:
            return
        checkpoint, snapshot = found
        number = snapshot.state.last_number + _MORE_LEASES
        merge = merge_of(snapshot.state.agreement)
        server = ParameterServer.resume(snapshot, first_number=number, cores=self._cores, merge=merge)
        self._nodes.resume(checkpoint.nodes, self._clock())
        history = checkpoint.history
        self.run = TrainingRun(checkpoint.job, server, history, self._nodes, self._send, self._clock)
        self._subscribers.begin((), len(history.totals), self._log(checkpoint.job.run))
        self.run.resume(checkpoint.used, checkpoint.due, checkpoint.seconds, checkpoint.waited)
        self._notify(f"going on with run {checkpoint.job.run} from update {server.version}")

    def wants_submission(self, peer: int, lengths: Sequence[int]) -> bool:
        """Whether a run may come now in buffers of these lengths. Raises BadFrame: no run has such."""
        return self._submissions.wants(peer, lengths)

    def submit(self, peer: int, buffers: Sequence[memoryview], submitter: str) -> None:
        """A command of somebody, whose name is known here, wants a run."""
        self._begin(self._submissions.submit(peer, buffers, self._reason_to_wait(), submitter))

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> None:
        """A piece of a blob came from the command that submits a run."""
        self._begin(self._submissions.chunk(peer, chunk, data))

    def fetch(self, peer: int, fetch: FetchBlob) -> None:
        """A node lacks a piece of a blob."""
        chunk, data = self._blobs.chunk(fetch)
        self._send(peer, chunk, (data,))

    def watch(self, peer: int, run: str) -> None:
        """A command subscribes to a run, or wants its result."""
        if self.run is not None and self.run.job.run == run:
            self._subscribers.add(peer, self.run)
            return
        try:
            result = load_result(self._home.runs / run)
        except EvenerError as error:
            self._send(peer, RunRejected(reason=shown(f"there is no run {run}: {error}")))
            return
        header = RunFinished(exit_code=result.exit_code, reason=shown(result.reason))
        self._send(peer, header, (result.record, result.weights))

    def owner_of(self, run: str) -> str | None:
        """Who submitted the run in progress, if it is `run`."""
        return self.run.job.submitter if self.run is not None and self.run.job.run == run else None

    def stop(self, stop: StopRun) -> None:
        """A command wants the run to end."""
        if self.run is not None and self.run.job.run == stop.run:
            self.end(Interrupted(f"stopped after update {self.run.server.version} as asked"))

    def is_watching(self, peer: int) -> bool:
        """Whether a command watches the run, or is submitting one."""
        return peer in self._subscribers or self._submissions.is_of(peer)

    def disconnected(self, peer: int) -> None:
        """A connection is gone."""
        self._submissions.left(peer)
        if self._subscribers.remove(peer) and self.run is not None:
            self._notify(f"the command that watched run {self.run.job.run} is gone; the run goes on")

    def admit(self, node: NodeRecord) -> None:
        """A node is a member, or is one again: give it work."""
        if self.run is not None and node.profile is not None:
            self.run.admit(node)

    def ready(self, node: NodeRecord, run: str, unit_seconds: float) -> None:
        """A node has model and data."""
        if self.run is None or self.run.job.run != run:
            return
        if node.is_present:
            self.run.ready(node, unit_seconds)
        else:
            node.ready = run

    def tick(self, now: float, is_delivering: Callable[[int], bool]) -> None:
        """What the time brings: events for subscribers, the late, the end.

        Args:
            now: seconds.
            is_delivering: whether something is on its way to a connection, and gets on.
        """
        run = self.run
        if run is None:
            return
        run.begin(self._nodes.present)
        run.tick(is_delivering)
        self._subscribers.tick(run, now)
        if run.failure is not None or run.is_complete:
            self.end(run.failure)
        else:
            self._checkpointer.save_if_due(run, self._nodes)

    def end(self, error: EvenerError | None) -> None:
        """The run, if there is one, is over: keep what remains of it, tell those who watch, release the nodes."""
        if (run := self.run) is None:
            return
        self._subscribers.flush(run)
        header = RunFinished(exit_code=error.exit_code if error else 0, reason=shown(str(error)) if error else "")
        result = RunResult(header.exit_code, header.reason, b"", b"")
        if run.journal.history.totals:
            result = result._replace(record=self._record(run), weights=weights_of(run.server.weights))
        where = self._keep(run, result)
        self._release(run, header, (result.record, result.weights) if result.record else ())
        self._notify(f"run {run.job.run} is over{f': {error}' if error else ''}; {where}")

    def set_aside(self, error: Exception) -> None:
        """The run cannot be gone on with, because of something here: keep it apart, say so, go on without it."""
        what = "the run that was in progress" if self.run is None else f"run {self.run.job.run}"
        sentence = shown(f"{what} cannot be gone on with ({type(error).__name__}: {first_line(error)})")
        if self.run is not None:
            self._release(self.run, RunFinished(exit_code=EvenerError.exit_code, reason=sentence), ())
        self._notify(f"warning: {sentence}; {self._checkpointer.set_aside()}")

    def _keep(self, run: TrainingRun, result: RunResult) -> str:
        """Write down what a run has come to; where that is, in words."""
        try:
            if result.record:
                save_result(self._folder(run), result)
        except OSError as error:
            return f"its results cannot be written ({error.strerror}); {self._checkpointer.set_aside()}"
        self._checkpointer.forget()
        return f"results are in {self._folder(run)}" if result.record else "nobody worked for it"

    def _release(self, run: TrainingRun, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """Nobody works for the run, or watches it, any more."""
        self.run = None
        self._subscribers.end(header, buffers)
        for node in self._nodes.by_name.values():
            node.ready, node.doing, node.worker = "", "waits", None
            node.not_ready.discard(run.job.run)
            self._send(node.peer, Release(run=run.job.run))

    def close(self) -> None:
        """Write down the run in progress and end threads."""
        if self.run is not None:
            self._checkpointer.save(self.run, self._nodes)
        self._subscribers.close()
        self._checkpointer.close()
        self._submissions.close()
        self._cores.close()

    def _begin(self, submission: Submission | None) -> None:
        """Begin with a run of which nothing is missing any more."""
        if submission is None:
            return
        job = replace(submission.job, run=self._free_name(submission.job.run))
        server = ParameterServer(
            job.agreement,
            job.workload,
            submission.weights,
            cores=self._cores,
            first_number=time.time_ns(),
            merge=merge_of(job.agreement),
        )
        self.run = TrainingRun(job, server, History(), self._nodes, self._send, self._clock)
        self.run.submitted = submission.submitted
        self._subscribers.begin((submission.peer,), 0, self._log(job.run))
        self._send(submission.peer, RunAccepted(run=job.run))
        self._notify(f"run {job.run} begins")
        for node in self._nodes.present:
            self.admit(node)

    def _free_name(self, wanted: str) -> str:
        """The name of a new run: the wanted one, or with a number behind it if there are results of that name."""
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
        return next(name for name in names if not (self._home.runs / name).exists())

    def _record(self, run: TrainingRun) -> bytes:
        """What is written down of a run in which somebody had a part."""
        return encode_record(
            record_of(
                run.job,
                run.journal.history,
                self._nodes.by_name,
                run.speeds.costs,
                seconds=run.seconds or 0.0,
                startup=run.waited if run.seconds is not None else 0.0,
                environment=self._config.environment,
            )
        )

    def _folder(self, run: TrainingRun) -> Path:
        return self._home.runs / run.job.run

    def _log(self, run: str) -> EventLog:
        """Where all that happens in a run is kept."""
        folder = self._home.runs / run
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return EventLog(folder / EVENTS_FILE, self._notify, private=True)

    def _reason_to_wait(self) -> str:
        """Why no other run can begin now; empty if one can."""
        if self.run is None:
            return ""
        run, version = self.run.job.run, self.run.server.version
        return (
            f"the master is busy with run {run}, {version} updates so far: wait for it (`evener nodes` shows it, "
            f"its results will be in {self._folder(self.run)}), or end it with `evener stop`"
        )
