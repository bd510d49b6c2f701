"""The master's dealings with runs: takes one in at a time, gets its parcels, tells those who watch, and settles it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from evener.errors import EvenerError, Interrupted
from evener.noun import Part
from evener.star.home import Home
from evener.star.job import Job, decode_job
from evener.star.ledger import Ledger
from evener.star.members import Member, Members
from evener.star.memory import Keeper, Memory
from evener.star.messages import (
    Accepted,
    Chunk,
    Fetch,
    Finished,
    Letter,
    News,
    Rejected,
    Release,
    Stop,
)
from evener.star.parcels import Collector, Supplier
from evener.star.run import Run
from evener.star.settlement import Result, encode_record, keep_result, plan_of, recall_result, record_of, weights_of
from evener.star.situation import RunState
from evener.star.words import Word, encode_words
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.packing import as_bytes
from evener.sync.server import Server
from evener.sync.snapshot import Snapshot
from evener.wire.frame import Buffer

_NEWS_SECONDS = 0.25
_KEEP_SECONDS = 2.0
"""Between two snapshots, at least."""
_MOST_KEEPING = 0.05
"""Of the master's time, that taking snapshots may cost."""
Send = Callable[[int, Letter, Sequence[Buffer]], None]


class Submission(Part, frozen=True, kw_only=True):
    """A run that was asked for and waits for its parcels; without the weights, it is also what a master remembers."""

    peer: int
    job: Job
    submitted: float


class Employer:
    """All that a master does for runs.

    Args:
        home: where results go.
        members: those who may work.
        send: to a connection.
        clock: seconds.
        patience: that everybody has.
        environment: versions, for records.
        say: tells the master's user.
    """

    def __init__(
        self,
        home: Home,
        members: Members,
        send: Send,
        clock: Callable[[], float],
        patience: float,
        environment: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._home, self._members, self._send, self._clock = home, members, send, clock
        self._patience, self._environment, self._say = patience, environment, say
        self._collector, self._supplier = Collector(home.parcels), Supplier(home.parcels)
        self._cores = Cores()
        self._submission: Submission | None = None
        self._weights: Flat | None = None
        self._keeper = Keeper(home.run)
        self._keep_after = 0.0
        self._kept_version = -1
        self._watchers: set[int] = set()
        self._words: list[Word] = []
        self._told = 0.0
        self._begun = 0.0
        self._startup = 0.0
        self._columns = 0
        self.run: Run | None = None

    def submit(self, peer: int, buffers: Sequence[memoryview]) -> None:
        """A command wants a run."""
        try:
            job = decode_job(buffers[0])
            weights = Flat(job.layout, as_bytes(buffers[1]))
            if reason := self._reason_to_wait():
                self._send(peer, Rejected(reason=reason), ())
                return
            self._submission, self._weights = Submission(peer=peer, job=job, submitted=time.time()), weights
            self._ask(peer, self._collector.collect(job.parcels))
        except (msgspec.DecodeError, IndexError, EvenerError) as error:
            self._drop_submission()
            self._send(peer, Rejected(reason=f"the run cannot be understood: {error}"), ())
            return
        self._begin_if_complete()

    def recall(self) -> None:
        """Go on with the run that the last master of this home had in progress, if there was one.

        Raises:
            InvalidFile: it cannot be read.
        """
        found = self._keeper.recall()
        if found is None:
            return
        memory, snapshot = found
        server = Server.resume(snapshot, first_number=time.time_ns(), cores=self._cores)
        self._members.roster = replace(memory.roster.restarted(self._clock()), patience=self._patience)
        self.run = Run(memory.job, server, Ledger(memory.ledger), self, self._clock, self._patience)
        self._begun, self._startup = memory.begun, memory.startup
        self._columns = len(self.run.ledger.names)
        self.run.resume(memory.used, memory.due, snapshot.state.unit_seconds)
        self._say(f"going on with run {memory.job.run} from update {server.version}")

    def watch(self, peer: int, run: str) -> None:
        """A command wants to hear of a run, or what came of it."""
        if self.run is not None and self.run.job.run == run:
            self._tell_news(self.run)
            self._watchers.add(peer)
            self._tell_plan(self.run)
            return
        try:
            result = recall_result(self._home.runs / run)
        except EvenerError as error:
            self._send(peer, Rejected(reason=f"there is no run {run}: {error}"), ())
            return
        self._send(peer, Finished(exit_code=result.exit_code, reason=result.reason), (result.record, result.weights))

    def chunk(self, peer: int, chunk: Chunk, data: memoryview) -> None:
        """A piece of a parcel came from the command that submitted a run."""
        if self._submission is None or self._submission.peer != peer:
            return
        try:
            self._ask(peer, self._collector.take(chunk, data))
        except (EvenerError, OSError) as error:
            self._drop_submission()
            self._send(peer, Rejected(reason=str(error)), ())
            return
        self._begin_if_complete()

    def fetch(self, peer: int, fetch: Fetch) -> None:
        """A node lacks a piece of a parcel."""
        chunk, data = self._supplier.supply(fetch)
        self._send(peer, chunk, (data,))

    def stop(self, stop: Stop) -> None:
        """A command wants the run to end."""
        if self.run is not None and self.run.job.run == stop.run:
            self.settle(Interrupted(f"stopped after update {self.run.server.version} as asked"))

    def left(self, peer: int) -> None:
        """A connection is gone."""
        if self._submission is not None and self._submission.peer == peer:
            self._drop_submission()
        if peer in self._watchers:
            self._watchers.remove(peer)
            if self.run is not None:
                self._say(f"the command that watched run {self.run.job.run} is gone; the run goes on")

    @property
    def watchers(self) -> tuple[int, ...]:
        """Connections of commands that watch."""
        return tuple(self._watchers)

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
        self._tell_columns(run)
        if now - self._told >= _NEWS_SECONDS:
            self._told = now
            self._tell_news(run)
        if run.failure is not None:
            self.settle(run.failure)
        elif run.is_complete:
            self.settle(None)
        elif now >= self._keep_after and run.server.version != self._kept_version and not self._keeper.is_busy:
            self._keep(run, now)

    def settle(self, error: EvenerError | None) -> None:
        """The run is over: keep what remains of it, tell those who watch, release the nodes."""
        run = self.run
        assert run is not None
        self._tell_news(run)
        record = None
        if run.ledger.names:
            record = record_of(
                run.job,
                run.ledger,
                run.server,
                self._members.by_name,
                run.costs,
                seconds=time.time() - self._begun if self._begun else 0.0,
                startup=self._startup,
                environment=self._environment,
            )
        header = Finished(exit_code=error.exit_code if error else 0, reason=str(error) if error else "")
        buffers: tuple[bytes, ...] = ()
        if record is not None:
            result = Result(header.exit_code, header.reason, encode_record(record), weights_of(run.server.weights))
            keep_result(self._home.runs / run.job.run, result)
            buffers = (result.record, result.weights)
        for peer in self._watchers:
            self._send(peer, header, buffers)
        self._keeper.forget()
        for member in self._members.by_name.values():
            member.ready, member.doing = "", "waits"
            if member.peer is not None:
                self._send(member.peer, Release(run=run.job.run), ())
        self._say(f"run {run.job.run} is over{f': {error}' if error else ''}; results are in {self._folder(run)}")
        self._watchers.clear()
        self.run = None

    def state(self) -> RunState | None:
        """How the run is doing."""
        run = self.run
        if run is None:
            return None
        validations = run.ledger.validations
        return RunState(
            run=run.job.run,
            task=run.job.title,
            protocol=run.job.protocol,
            version=run.server.version,
            epoch=run.ledger.epoch,
            epochs=run.job.workload.num_epochs,
            loss=run.ledger.loss,
            accuracy=validations[-1].accuracy if validations else None,
            folder=self._folder(run),
        )

    def send(self, name: str, header: Letter, buffers: Sequence[Buffer] = ()) -> None:
        """Send to a node, if it has a connection."""
        member = self._members.by_name.get(name)
        if member is not None and member.peer is not None:
            self._send(member.peer, header, buffers)

    def tell(self, word: Word) -> None:
        """Tell those who watch."""
        self._words.append(word)

    def close(self) -> None:
        """Write down the run in progress, close files and end threads."""
        if self.run is not None:
            self._keep(self.run, self._clock())
        self._keeper.close()
        self._collector.close()
        self._supplier.close()
        self._cores.close()

    def _keep(self, run: Run, now: float) -> None:
        """Begin to write down the run, if it is the time."""
        snapshot = run.server.snapshot()
        state = replace(snapshot.state, unit_seconds=dict(snapshot.state.unit_seconds))
        memory = Memory(
            server=f"server-{run.server.version}.safetensors",
            job=run.job,
            ledger=run.ledger.state(),
            used=run.used,
            due=run.due,
            begun=self._begun,
            startup=self._startup,
            roster=self._members.roster.snapshot(now),
        )
        try:
            self._keeper.keep(memory, Snapshot(state, snapshot.weights, snapshot.optimiser))
        except OSError as error:
            self._say(f"warning: the run cannot be written down, a killed master would lose it: {error}")
        self._kept_version = run.server.version
        self._keep_after = now + max(_KEEP_SECONDS, (self._clock() - now) / _MOST_KEEPING)

    def _folder(self, run: Run) -> str:
        return str(self._home.runs / run.job.run)

    def _reason_to_wait(self) -> str:
        if self.run is not None:
            run, version = self.run.job.run, self.run.server.version
            return (
                f"the master is busy with run {run}, {version} updates so far: wait for it (`evener nodes` shows it, "
                f"its results will be in {self._folder(self.run)}), or end all with `evener down`"
            )
        return "another command is submitting a run at this moment: try again" if self._submission else ""

    def _ask(self, peer: int, fetches: Sequence[Fetch]) -> None:
        for fetch in fetches:
            self._send(peer, fetch, ())

    def _drop_submission(self) -> None:
        self._collector.close()
        self._submission = self._weights = None

    def _begin_if_complete(self) -> None:
        submission, weights = self._submission, self._weights
        if submission is None or weights is None or not self._collector.is_complete:
            return
        self._drop_submission()
        job = submission.job
        server = Server(job.agreement, job.workload, weights, cores=self._cores, first_number=time.time_ns())
        self.run = Run(job, server, Ledger(), self, self._clock, self._patience)
        self._startup, self._begun, self._columns = submission.submitted, 0.0, 0
        self._kept_version, self._keep_after = -1, 0.0
        self._watchers = {submission.peer}
        self._send(submission.peer, Accepted(run=job.run), ())
        self._say(f"run {job.run} begins")
        for member in self._members.present:
            self.take_in(member.name)

    def _tell_columns(self, run: Run) -> None:
        """Tell the division of the work, whenever another node has come to take part."""
        if len(run.ledger.names) == self._columns or not run.server.workers:
            return
        if not self._begun:
            self._begun = time.time()
            self._startup = self._begun - self._startup
        self._tell_steps(run)
        self._tell_plan(run)

    def _tell_plan(self, run: Run) -> None:
        self._columns = len(run.ledger.names)
        if self._columns:
            devices = {name: member.device for name, member in self._members.by_name.items()}
            self.tell(plan_of(run.job, run.ledger.names, devices, run.costs))

    def _tell_steps(self, run: Run) -> None:
        step = run.ledger.news(self._columns)
        if step is not None and self._columns:
            self.tell(step)

    def _tell_news(self, run: Run) -> None:
        self._tell_steps(run)
        if self._words and self._watchers:
            data = encode_words(self._words)
            for peer in self._watchers:
                self._send(peer, News(), (data,))
        self._words.clear()
