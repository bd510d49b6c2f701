"""The master's dealings with runs: takes one in at a time, has it done by the members, and settles it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from evener.errors import EvenerError, Interrupted
from evener.events import RunEvent
from evener.ps.audience import Audience
from evener.ps.blob_transfer import BlobSender
from evener.ps.keeping import Keeping
from evener.ps.ledger import Ledger
from evener.ps.members import Member, Members
from evener.ps.memory import Keeper
from evener.ps.messages import BlobChunk, FetchBlob, Header, Release, RunAccepted, RunFinished, RunRejected, StopRun
from evener.ps.results import RunResult, encode_record, load_result, record_of, save_result, weights_of
from evener.ps.run import Run
from evener.ps.state_dir import StateDir
from evener.ps.status import RunStatus, run_status
from evener.ps.submission import Send, Submission, Submissions
from evener.sync.server import Server
from evener.sync.threads import ThreadPool
from evener.wire.frame import Buffer


class Employer:
    """All that a master does for runs.

    Args:
        home: where results go.
        members: those who may work.
        send: to a connection.
        is_sending: whether a connection has not taken all yet.
        clock: seconds.
        patience: that everybody has.
        environment: versions, for records.
        say: tells the master's user.

    Attributes:
        run: in progress, if there is one.
    """

    def __init__(
        self,
        home: StateDir,
        members: Members,
        send: Send,
        is_sending: Callable[[int], bool],
        clock: Callable[[], float],
        patience: float,
        environment: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._home, self._members, self._send, self._clock = home, members, send, clock
        self._is_sending = is_sending
        self._patience, self._environment, self._say = patience, environment, say
        self._submissions, self._sender = Submissions(home.blobs, send), BlobSender(home.blobs)
        self._audience = Audience(send, members.by_name)
        self._keeping = Keeping(Keeper(home.run), clock, say)
        self._cores = ThreadPool()
        self._submitted = self._begun = 0.0
        self.run: Run | None = None

    def recall(self) -> None:
        """Go on with the run that the last master of this home had in progress, if there was one.

        Raises:
            InvalidFile: it cannot be read.
        """
        found = self._keeping.recall()
        if found is None:
            return
        memory, snapshot = found
        server = Server.resume(snapshot, first_number=time.time_ns(), cores=self._cores)
        self._members.roster = replace(memory.roster.restarted(self._clock()), patience=self._patience)
        self.run = Run(memory.job, server, Ledger(memory.ledger), self, self._clock, self._patience)
        self._begun, self._submitted = memory.begun, memory.submitted
        self._audience.begin((), len(self.run.ledger.names))
        self.run.resume(memory.used, memory.due)
        self._say(f"going on with run {memory.job.run} from update {server.version}")

    def submit(self, peer: int, buffers: Sequence[memoryview]) -> None:
        """A command wants a run."""
        self._begin(self._submissions.submit(peer, buffers, self._reason_to_wait()))

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> None:
        """A piece of a blob came from the command that submits a run."""
        self._begin(self._submissions.chunk(peer, chunk, data))

    def fetch(self, peer: int, fetch: FetchBlob) -> None:
        """A node lacks a piece of a blob."""
        chunk, data = self._sender.chunk(fetch)
        self._send(peer, chunk, (data,))

    def watch(self, peer: int, run: str) -> None:
        """A command wants to hear of a run, or what came of it."""
        if self.run is not None and self.run.job.run == run:
            self._audience.add(peer, self.run)
            return
        try:
            result = load_result(self._home.runs / run)
        except EvenerError as error:
            self._send(peer, RunRejected(reason=f"there is no run {run}: {error}"), ())
            return
        self._send(peer, RunFinished(exit_code=result.exit_code, reason=result.reason), (result.record, result.weights))

    def stop(self, stop: StopRun) -> None:
        """A command wants the run to end."""
        if self.run is not None and self.run.job.run == stop.run:
            self.settle(Interrupted(f"stopped after update {self.run.server.version} as asked"))

    def left(self, peer: int) -> None:
        """A connection is gone."""
        self._submissions.left(peer)
        if self._audience.remove(peer) and self.run is not None:
            self._say(f"the command that watched run {self.run.job.run} is gone; the run goes on")

    def take_in(self, name: str) -> None:
        """A node is a member, or is one again: give it work."""
        member = self._members.by_name.get(name)
        if self.run is not None and member is not None and member.profile is not None:
            self.run.take_in(member)

    def ready(self, member: Member, run: str, unit_seconds: float) -> None:
        """A node has model and data."""
        if self.run is None or self.run.job.run != run:
            return
        if not self._members.is_present(member.name):
            member.ready = run
            return
        self.run.ready(member, unit_seconds)

    def unfit(self, member: Member, run: str, reason: str) -> None:
        """A node cannot take part."""
        if self.run is not None and self.run.job.run == run:
            self.run.unfit(member, reason)

    def lose(self, name: str) -> None:
        """A node is no member any more, or takes no part in this round."""
        if self.run is not None:
            self.run.lose(name)

    def tick(self, now: float) -> None:
        """What the time brings: news, the late, the end."""
        run = self.run
        if run is None:
            return
        run.begin(self._members.present)
        run.tick()
        if not self._begun and run.server.members:
            self._begun = time.time()
        self._audience.tick(run, now)
        if run.failure is not None:
            self.settle(run.failure)
        elif run.is_complete:
            self.settle(None)
        else:
            self._keeping.keep_if_due(run, self._members.roster, begun=self._begun, submitted=self._submitted)

    def settle(self, error: EvenerError | None) -> None:
        """The run is over: keep what remains of it, tell those who watch, release the nodes."""
        run = self.run
        assert run is not None
        self._audience.tell_news(run)
        header = RunFinished(exit_code=error.exit_code if error else 0, reason=str(error) if error else "")
        buffers: tuple[bytes, ...] = ()
        if run.ledger.names:
            result = RunResult(header.exit_code, header.reason, self._record(run), weights_of(run.server.weights))
            save_result(self._home.runs / run.job.run, result)
            buffers = (result.record, result.weights)
        self._audience.end(header, buffers)
        self._keeping.forget()
        for member in self._members.by_name.values():
            member.ready, member.doing = "", "waits"
            self.send(member.name, Release(run=run.job.run))
        self._say(f"run {run.job.run} is over{f': {error}' if error else ''}; results are in {self._folder(run)}")
        self.run = None

    def state(self) -> RunStatus | None:
        """How the run is doing."""
        return None if self.run is None else run_status(self.run, self._home.runs / self.run.job.run)

    def send(self, name: str, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send to a node, if it has a connection."""
        member = self._members.by_name.get(name)
        if member is not None and member.peer is not None:
            self._send(member.peer, header, buffers)

    def is_sending(self, name: str) -> bool:
        """Whether a node's connection has not taken all yet."""
        member = self._members.by_name.get(name)
        return member is not None and member.peer is not None and self._is_sending(member.peer)

    def tell(self, word: RunEvent) -> None:
        """Tell those who watch."""
        self._audience.tell(word)

    def close(self) -> None:
        """Write down the run in progress, close files and end threads."""
        if self.run is not None:
            self._keeping.keep(self.run, self._members.roster, begun=self._begun, submitted=self._submitted)
        self._keeping.close()
        self._submissions.close()
        self._sender.close()
        self._cores.close()

    def _begin(self, submission: Submission | None) -> None:
        """Begin with a run of which nothing is missing any more."""
        if submission is None:
            return
        job = submission.job
        server = Server(job.agreement, job.workload, submission.weights, cores=self._cores, first_number=time.time_ns())
        self.run = Run(job, server, Ledger(), self, self._clock, self._patience)
        self._submitted, self._begun = submission.submitted, 0.0
        self._audience.begin((submission.peer,), 0)
        self._send(submission.peer, RunAccepted(run=job.run), ())
        self._say(f"run {job.run} begins")
        for member in self._members.present:
            self.take_in(member.name)

    def _record(self, run: Run) -> bytes:
        """What is written down of a run in which somebody had a part."""
        return encode_record(
            record_of(
                run.job,
                run.ledger,
                run.server,
                self._members.by_name,
                run.costs,
                seconds=time.time() - self._begun if self._begun else 0.0,
                startup=self._begun - self._submitted if self._begun else 0.0,
                environment=self._environment,
            )
        )

    def _folder(self, run: Run) -> str:
        return str(self._home.runs / run.job.run)

    def _reason_to_wait(self) -> str:
        """Why no other run can begin now; empty if one can."""
        if self.run is None:
            return ""
        run, version = self.run.job.run, self.run.server.version
        return (
            f"the master is busy with run {run}, {version} updates so far: wait for it (`evener nodes` shows it, "
            f"its results will be in {self._folder(self.run)}), or end all with `evener down`"
        )
