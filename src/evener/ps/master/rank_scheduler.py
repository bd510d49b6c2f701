"""The master's dealings with a run whose ranks work together: takes one in at a time, and keeps what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from evener.ps.master.collective.collective_run import CollectiveRun
from evener.ps.master.collective.rank_checkpoints import RankCheckpoints
from evener.ps.master.collective.rank_journal import Begun, RankJournal
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.run_status import busy_with, set_aside_sentence, status_of_ranks
from evener.ps.master.subscribers import Subscribers, open_log
from evener.ps.protocol.blob_stream import why_no_disk
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.job import Submission, Submissions
from evener.ps.protocol.messages import BlobChunk, Release, RunAccepted, RunFinished, RunRejected, Send
from evener.ps.protocol.rank_messages import RankJob
from evener.ps.protocol.run_result import RunResult, save_result
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError, Interrupted
from evener.records.schema import shown


class RankScheduler:
    """See the first line; close it.

    Args:
        config: of the master.
        nodes: those who may work.
        send: to connections.
        why_not: why other runs leave no room for one; empty if they do.

    Attributes:
        run: in progress, if there is one.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send, why_not: Callable[[], str]) -> None:
        self._config, self._nodes, self._send, self._why_not = config, nodes, send, why_not
        self._submissions = Submissions(config.home.blobs, send, config.clock, lambda _: self.busy or why_not())
        self._subscribers = Subscribers(nodes, send)
        self._journal = RankJournal(config.home, config.notify)
        self.run: CollectiveRun | None = None

    def resume(self) -> None:
        """Go on with the run that the last master of this home had in progress, if there was one."""
        if (found := self._journal.load()) is None:
            return
        self.run = self._run_of(found.begun.job)
        self.run.resume(found)
        self._subscribers.begin((), 0, open_log(self._config, self.name))
        self._config.notify(f"going on with run {self.name}, whose ranks work together")

    @property
    def name(self) -> str:
        """Of the run in progress; empty if there is none."""
        return "" if self.run is None else self.run.job.run

    @property
    def busy(self) -> str:
        """Why no other run can begin now; empty if one can."""
        return "" if self.run is None else busy_with(status_of_ranks(self.run, self._config.home.runs))

    def submit(self, peer: int, buffers: Sequence[memoryview], submitter: str) -> None:
        """A command of somebody, whose name is known here, wants a run."""
        self._begin(self._submissions.submit(peer, buffers, submitter))

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> None:
        """A piece of a blob came from the command that submits a run."""
        self._begin(self._submissions.chunk(peer, chunk, data))

    def watch(self, peer: int, run: str) -> bool:
        """Somebody subscribes to a run; whether it is in progress here."""
        if self.run is None or self.name != run:
            return False
        self._subscribers.greet(peer, run, self.run.news.so_far)
        return True

    def is_watching(self, peer: int) -> bool:
        """Whether a command watches the run, or is submitting one."""
        return peer in self._subscribers or self._submissions.is_of(peer)

    def disconnected(self, peer: int) -> None:
        """A connection is gone."""
        self._submissions.left(peer)
        if self.run is not None and (node := self._nodes.at(peer)) is not None:
            self.run.left(node)
        if self._subscribers.remove(peer) and self.run is not None:
            self._config.notify(f"the command that watched run {self.name} is gone; the run goes on")

    def owner_of(self, run: str) -> str | None:
        """Who submitted the run in progress, if it is this one."""
        return self.run.job.submitter if self.run is not None and self.name == run else None

    def stop(self, run: str) -> None:
        """A command wants a run to end."""
        if self.run is not None and self.name == run:
            self.run.stop(Interrupted("stopped as asked"))

    def admit(self, node: NodeRecord) -> None:
        """A node is a member, or is one again."""
        if self.run is not None and node.profile is not None:
            self.run.admit(node)

    def follow(self, kind: str, reason: str, node: NodeRecord, is_lost: bool) -> None:
        """Something happened to a node, without which the run may have to go on."""
        if self.run is not None:
            self.run.note(kind, f"node {node.name}: {reason}", node.name)
            if is_lost:
                self.run.lose(node, reason, is_silent=kind == "benched")

    def tick(self, now: float) -> None:
        """What the time brings: events for subscribers, the late, the end."""
        if (run := self.run) is None:
            return
        run.tick()
        if self._subscribers.is_time(now):
            self._flush(run)
        if run.failure is not None or run.is_complete:
            self.end(run.failure)

    def end(self, error: EvenerError | None) -> None:
        """The run is over, if there is one: keep what remains of it, tell those who watch, release the nodes."""
        if (run := self.run) is None:
            return
        self._flush(run)
        run.close()
        reason, weights = str(error) if error else "", run.weights
        if not weights and (weights := run.checkpoints.weights()):
            reason += f"; the weights after step {run.checkpoints.last.step} are what remains"
        run.checkpoints.forget()
        header = RunFinished(kind=kind_of(error) if error else None, reason=shown(reason), run=run.job.run)
        record = msgspec.json.format(run.news.record, indent=1) if run.news.has_record else b""
        result = RunResult(header.kind, header.reason, record, weights)
        where = self._keep(self._config.home.runs / run.job.run, result)
        self._journal.forget()
        self._release(header, (result.record, result.weights) if record or weights else ())
        self._config.notify(f"run {run.job.run} is over{f': {error}' if error else ''}; {where}")

    def set_aside(self, error: Exception) -> None:
        """The run cannot be gone on with, because of something here: keep it apart, say so, go on without it."""
        name = f"run {self.name}" if self.name else "the run whose ranks worked together"
        sentence = set_aside_sentence(name, error)
        self._config.notify(f"warning: {sentence}; {self._journal.set_aside()}")
        if self.run is not None:
            self.run.checkpoints.close()
            self._release(RunFinished(kind=kind_of(EvenerError(sentence)), reason=sentence, run=self.name), ())

    def close(self) -> None:
        """The master ends."""
        if self.run is not None:
            self.run.checkpoints.close()
            self.run.news.forget_record()
        self._submissions.close()
        self._subscribers.close()
        self._journal.close()

    def _begin(self, submission: Submission | None) -> None:
        """Begin with a run of which nothing is missing any more."""
        if submission is None:
            return
        assert isinstance(submission.job, RankJob)
        if reason := self.busy or self._why_not() or why_no_disk(self._config.home.folder):
            self._send(submission.peer, RunRejected(reason=shown(reason)))
            return
        job = replace(submission.job, run=self._config.home.free_name(submission.job.run))
        self._journal.add(Begun(job=job, secret=b""))
        self.run = self._run_of(job)
        self._subscribers.begin((submission.peer,), 0, open_log(self._config, job.run))
        self._send(submission.peer, RunAccepted(run=job.run))
        self._config.notify(f"run {job.run} begins: its ranks work together")
        for node in self._nodes.present:
            self.admit(node)

    def _run_of(self, job: RankJob) -> CollectiveRun:
        config = self._config
        checkpoints = RankCheckpoints(config.home.blobs, self._send, self._journal.add, config.notify)
        return CollectiveRun(job, self._nodes, self._send, config.clock, self._journal, checkpoints)

    def _release(self, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """Nobody works for the run, or watches it, any more: its nodes end their processes."""
        if self.run is not None:
            self.run.news.forget_record()
        self.run = None
        self._subscribers.end(header, buffers)
        for node in self._nodes.by_name.values():
            node.ready, node.doing = "", "waits"
            node.not_ready.discard(header.run)
            self._send(node.peer, Release(run=header.run))

    def _flush(self, run: CollectiveRun) -> None:
        self._subscribers.show(run.job.run, run.news.take())

    def _keep(self, folder: Path, result: RunResult) -> str:
        """Write down what a run has come to; where that is, in words."""
        if not result.record and not result.weights:
            return "it has come to nothing"
        try:
            save_result(folder, result)
        except OSError as error:
            return f"its results cannot be written ({error.strerror})"
        return f"results are in {folder}"
