"""The training of one run with an agreement, at the master: the parameter server, validation and history, connected to
the nodes at work.

What a run learns about nodes (a good update, a refused one, a late one) goes into `observations`, and membership
decides on it. The run itself leaves a node out only if the master has no memory for its contributions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf
from random import SystemRandom

from evener.agreements.messages import Judgement, ServerOutput
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.run_memory import run_memory
from evener.ps.master.node_state import Occurrence
from evener.ps.master.nodes import NodeRecord, Nodes, no_usable_node, stragglers
from evener.ps.master.run_journal import RunJournal
from evener.ps.master.run_speeds import RunSpeeds, SlowLink
from evener.ps.master.validation import EpochEnd, SlicesForNode, Validations
from evener.ps.protocol.job import Job, encode_job
from evener.ps.protocol.messages import Contribution, Prepare, Send, ServerReply, Validated
from evener.records.errors import EvenerError, NonFiniteLoss
from evener.records.history import History, NodeWork
from evener.records.record import Validation
from evener.wire.errors import BadFrame

_MAX_REFUSALS = 3
"""Refused updates per worker, in a row and without a good update, after which training counts as diverged."""
MAX_DUE = 4
"""Epochs whose validation may be due while work goes on, since each holds a copy of the weights."""
_DIVERGED = "every update of every node is refused, training has diverged; a lower learning rate may help"


class LeaseTraining:
    """One run.

    Args:
        job: job to do.
        server: parameter server of the run.
        history: history of the run.
        nodes: all nodes, which may work.
        send: sends a message to a connection.
        clock: seconds.
        room: returns the bytes of memory that are free for another node's contributions.

    Attributes:
        speeds: speeds of the nodes.
        journal: journal of the run.
        validation: validations of its epochs.
        observations: occurrences of nodes, for membership.
        failure: error that ends the run; None if it can go on.
        faulty: nodes to expel, with what they answered or sent.
        has_assigned_work: whether work is assigned.
        used: samples used, of each unfinished epoch.
        submitted: time of the submission.
        begun: time when a node first worked; None before.
    """

    def __init__(
        self,
        job: Job,
        server: ParameterServer,
        history: History,
        nodes: Nodes,
        send: Send,
        clock: Callable[[], float],
        room: Callable[[], float] = lambda: inf,
    ) -> None:
        self.job, self.server = job, server
        self._memory, self._room = run_memory(job.agreement, job.layout), room
        self._crowded_out: deque[NodeRecord] = deque()
        self.observations: deque[tuple[Occurrence, NodeRecord]] = deque()
        self.failure: EvenerError | None = None
        self.has_assigned_work = False
        self.used: dict[int, int] = {}
        self.submitted = clock()
        self.begun: float | None = None
        self._nodes, self._send, self._clock = nodes, send, clock
        self.speeds = RunSpeeds(server, nodes)
        self.journal = RunJournal(history, clock)
        self.validation = RunValidation(job, self.journal, self.speeds, nodes, send, clock)
        self.faulty: list[tuple[NodeRecord, str]] = []
        self._refused_in_a_row = 0
        self._first_ready = inf
        self._progress_at = clock()

    def resume(self, used: Mapping[int, int], due: Sequence[EpochEnd], seconds: float | None, waited: float) -> None:
        """Continue the run of a master that was killed, with these samples used, and these epochs to validate.

        The time without a master does not count.
        """
        now = self._clock()
        self.begun = None if seconds is None else now - seconds
        self.submitted = (now if self.begun is None else self.begun) - waited
        self.used = dict(used)
        for name, worker in self.server.workers.items():
            if self.job.takes(name):
                self._nodes.record(name).worker = worker
        for end in due:
            self.validation.begin(end)
        self.note("master restarted", f"the master continues from update {self.server.version}")

    @property
    def seconds(self) -> float | None:
        """Seconds since a node first worked; None before."""
        return None if self.begun is None else self._clock() - self.begun

    @property
    def waited(self) -> float:
        """Seconds from the submission until a node worked, or until now."""
        return (self._clock() if self.begun is None else self.begun) - self.submitted

    @property
    def held_bytes(self) -> int:
        """Memory that the weights, the optimizer, the nodes at work and the validations that are due may take."""
        ends = {end.version for end in self.validation.due}
        members = max(1, len(self.server.members))
        return self._memory.fixed_bytes + self._memory.member_bytes * members + self.job.layout.num_bytes * len(ends)

    def admit(self, node: NodeRecord) -> None:
        """Let a member prepare, or work if it is ready and work has begun."""
        if self.job.run in node.left_out_of:
            return
        if node.ready_for != self.job.run:
            node.doing = "prepares"
            self._send(node.peer, Prepare(run=self.job.run), [encode_job(self.job)])
            return
        if node.leaving_until is not None and not self.server.worker(node.name).is_here:
            self.validation.remind(node)  # of slices that no other node can have
            return
        node.doing = "works" if self.has_assigned_work else "waits for the other nodes to prepare"
        if self.has_assigned_work:
            self._begin_work(node)

    def ready(self, node: NodeRecord, unit_seconds: float, fixed_samples: float = 0.0) -> None:
        """Note that a node is ready, and its own measurements, as in `Ready`."""
        self.server.benchmark(node.name, unit_seconds, fixed_samples)
        if self.has_assigned_work:
            self.speeds.bound_claims([*self.server.members, self.server.worker(node.name)])
        node.ready_for = self.job.run
        self._first_ready = min(self._first_ready, self._clock())
        self.admit(node)

    def not_ready(self, node: NodeRecord, reason: str, error: EvenerError | None = None) -> None:
        """Continue without a node that cannot take part; only its first reason is recorded."""
        if self.job.run in node.left_out_of:
            return
        node.leave_out(self.job.run, reason, error)
        self.note("left out", f"node {node.name} cannot take part: {reason}", node.name)

    def begin(self, present: Sequence[NodeRecord]) -> None:
        """Begin work once all connected nodes are ready, or one has waited for the others for the patience."""
        self._readmit()
        run = self.job.run
        now, patience = self._clock(), self._nodes.patience
        awaited = [node for node in present if self.has_assigned_work or not node.is_overdue(now, patience)]
        able = [node for node in awaited if run not in node.left_out_of]
        ready = [node for node in able if node.ready_for == run]
        if awaited and not able and not any(node in self._crowded_out for node in present):
            self.failure = no_usable_node(present, run, now, patience)
        if ready and not self.has_assigned_work and (len(ready) == len(able) or now - self._first_ready > patience):
            self.has_assigned_work, self.server.quorum = True, len(ready)
            self.speeds.bound_claims([self.server.worker(node.name) for node in ready])
            for node in ready:
                self.admit(node)
            self.server.quorum = 1  # from now on the others continue when nodes join or leave
            self._follow(self.server.proceed())  # if there was no memory for all of them

    def retire(self, node: NodeRecord) -> None:
        """Give a node no further work."""
        self.server.retire(node.name)
        self._follow(self.server.proceed())

    def is_free(self, node: NodeRecord) -> bool:
        """Return whether a node has no unanswered leases or slices."""
        worker = self.server.workers.get(node.name)
        return (worker is None or not worker.leases) and not self.validation.has_slices(node)

    def reassign(self, node: NodeRecord) -> None:
        """Assign a node's unfinished work to others."""
        worker = self.server.workers.get(node.name)
        if self.job.agreement.push == "top-k" and worker is not None and worker.is_here and worker.totals.applied:
            message = f"what top-k left out of the updates of node {node.name} is lost, unless it comes back"
            self.note("remainder", message, node.name)
        self._follow(self.server.dismiss(node.name))
        self.validation.give_out()

    def inbox(self, node: NodeRecord, contribution: Contribution, num_bytes: int) -> memoryview | None:
        """Return memory for the bytes of a contribution; None if it is not needed."""
        if contribution.run != self.job.run:
            return None
        return self.server.inbox(node.name, contribution.push.number, num_bytes)

    def arrived(self, node: NodeRecord, contribution: Contribution, num_bytes: int) -> None:
        """Note that `num_bytes` of a contribution have arrived."""
        self.progress(node)
        self.server.arrived(node.name, contribution.push.number, num_bytes)

    def contribute(self, node: NodeRecord, contribution: Contribution, num_bytes: int) -> None:
        """Take a contribution that has arrived."""
        if contribution.run != self.job.run:
            return
        push, worker = contribution.push, node.worker
        seen = None
        if worker is not None and push.number in worker.leases:
            self.progress(node)
            seen = worker.seen(push.number, node.progress_at)
            if self.validation.pending:  # without a call for each contribution
                self.validation.contributed(node.name)
        self._follow(self.server.push(node.name, push, num_bytes, seen))

    def validated(self, node: NodeRecord, header: Validated) -> None:
        """Take an answer for a slice of the validation data.

        Raises:
            BadFrame: the answer cannot be true.
        """
        if header.run != self.job.run:
            return
        is_news, faulty = self.validation.answered(node, header)
        if is_news:
            self.progress(node)
        self.faulty += faulty
        self._pace()

    def progress(self, node: NodeRecord) -> None:
        """Note a sign of progress of a node."""
        node.progress_at = self._progress_at = self._clock()

    def tick(self, is_delivering: Callable[[int], bool]) -> None:
        """Find stragglers; `is_delivering` says whether a message to a peer is being delivered and makes progress."""
        now, patience = self._clock(), self._nodes.patience
        self._readmit()
        if self.server.members and self.begun is None:
            self.begun = now
        busy = self.speeds.step_seconds()
        moving = {node for node in busy if node.peer is not None and is_delivering(node.peer)}
        for node in moving:
            self.progress(node)
        late = self.server.late if self.job.agreement.skips_late else frozenset()
        if (0 < len(busy) < len(self.server.members) or late) and not self.server.is_over:
            if len(busy) == len(self.server.members):  # others are never idle where late nodes are not awaited
                busy = {node: seconds for node, seconds in busy.items() if node.name in late}
            for node in stragglers(busy, patience, now):
                self.server.worker(node.name).speed.was_late()
                self.observations.append(("late", node))
            for link in self.speeds.slow_links(moving, now):
                self._on_slow_link(link, now)
        if self.job.agreement.skips_late:
            for name in self.speeds.late(now):
                self.note("skipped", f"a round closes without node {name}, whose update enters a later one", name)
                self._follow(self.server.skip(name))
        if now - self._progress_at > patience:
            self._progress_at = now
            self.validation.give_out(reassign_late=True)
        self._pace()

    def _readmit(self) -> None:
        """Let nodes work for whose contributions the master had no memory, as far as it has some now."""
        while self._crowded_out and self._has_room():
            node = self._crowded_out.popleft()
            node.left_out_of.discard(self.job.run)
            if node.can_work and self.job.takes(node.name):
                self.admit(node)

    def _pace(self) -> None:
        """Let work wait while many validations are due, and go on afterwards."""
        is_paused = len(self.validation.pending) > MAX_DUE
        if is_paused != self.server.is_paused:
            self.server.is_paused = is_paused
            self._follow(self.server.proceed())

    def _on_slow_link(self, link: SlowLink, now: float) -> None:
        """Reduce what a node sends, if the agreement allows it and it is not reduced yet; else exclude the node."""
        is_reduced = self.server.send_less(link.node.name, now)
        self.note("slow link", link.sentence(self.job.agreement.slow_link if is_reduced else ""), link.node.name)
        if not is_reduced:
            self.observations.append(("late", link.node))

    def note(self, kind: str, message: str, *nodes: str) -> None:
        """Add an event about `nodes`."""
        self.journal.note(self.server.version, kind, message, nodes)

    def _has_room(self) -> bool:
        """Return whether the master has memory for what another node sends; the first one always has."""
        return not self.server.members or self._memory.member_bytes <= self._room()

    def _begin_work(self, node: NodeRecord) -> None:
        if not self.server.worker(node.name).is_here and not self._has_room():
            self._crowded_out.append(node)
            self.not_ready(node, "the master has no memory for the contributions of another node")
            node.ready_for = self.job.run  # it is, and begins when others leave
            return
        if not self.server.members:
            self.journal.start_timing()  # no node worked until now
        self.journal.history.add_node(node.name)
        node.worker = self.server.worker(node.name)
        self._follow(self.server.admit(node.name))
        self.validation.remind(node)
        self.validation.give_out()

    def _follow(self, output: ServerOutput) -> None:
        """Record the output of the server, and send its answers; validation slices go first, to be done first."""
        works: deque[tuple[str, NodeWork]] = deque()
        for judgement in output.judgements:
            if judgement.verdict == "applied":
                works.append((judgement.worker, self._applied(judgement)))
            else:
                self._refused(judgement)
        for update in output.updates:  # each has one contribution per worker, in order
            self.journal.updated(update, dict([works.popleft() for _ in update.staleness]))
            if not self.job.agreement.skips_late:
                self._use_up(update.epoch, update.num_samples)
        if self.job.agreement.skips_late:  # an update may have samples of several epochs
            for judgement in output.judgements:
                if judgement.verdict == "applied" and judgement.lease is not None:
                    self._use_up(judgement.lease.samples.epoch, judgement.num_samples)
        for reply in output.replies:
            answer, image, node = reply.answer, reply.image, self._nodes.by_name[reply.worker]
            if answer.lease is not None:
                node.progress_at = self._progress_at = self._clock()
                self.server.workers[reply.worker].lease_sent(answer.lease.number, node.progress_at)
                steps = answer.lease.num_steps  # heartbeats count as progress for the steps of this lease and the last
                node.steps_left = (node.steps_left if node.steps_left < steps else steps) + steps
            if image is not None and (work := self.journal.history.totals.get(reply.worker)) is not None:
                work.received += len(image)
                work.saved += self.job.layout.num_bytes - len(image)
            buffers = () if image is None else (image,)
            self._send(node.peer, ServerReply(run=self.job.run, answer=answer), buffers)
        if output.judgements and self.server.is_over and not self._has_learned():
            self._diverged(output.judgements[-1].worker)

    def _applied(self, judgement: Judgement) -> NodeWork:
        self._refused_in_a_row = 0
        self._observe("contributed", judgement)
        sent, whole = judgement.num_bytes, self.job.layout.num_bytes
        memory = self._nodes.by_name[judgement.worker].peak_memory_bytes
        return NodeWork(judgement.num_samples, judgement.seconds, sent, 0, whole - sent, memory=memory)

    def _refused(self, judgement: Judgement) -> None:
        self._refused_in_a_row += 1
        self.note("refused", f"the update of node {judgement.worker} was refused: {judgement.reason}", judgement.worker)
        self._observe("refused", judgement)
        if judgement.expels:
            self.faulty.append((self._nodes.by_name[judgement.worker], f"{judgement.reason}, repeatedly"))
        if judgement.lease is not None and not self.job.workload.parts:
            self._use_up(judgement.lease.samples.epoch, judgement.num_samples)
        if self._refused_in_a_row >= _MAX_REFUSALS * max(1, len(self.server.members)):
            self._diverged(judgement.worker)

    def _has_learned(self) -> bool:
        return any(worker.totals.applied for worker in self.server.workers.values())

    def _diverged(self, worker: str) -> None:
        self.failure = NonFiniteLoss(worker, self.server.version + 1, float("nan"), f": {_DIVERGED}")

    def _observe(self, what: Occurrence, judgement: Judgement) -> None:
        """Report an occurrence to membership, unless the node has left since."""
        node = self._nodes.by_name[judgement.worker]
        if node.peer is not None and node.worker is not None and node.worker.is_here:
            self.observations.append((what, node))

    def _use_up(self, epoch: int, num_samples: int) -> None:
        """Note that samples are used; epochs end in order. With fixed parts of the data, a round is an epoch."""
        wanted = 1 if self.job.workload.parts else self.job.workload.num_samples
        self.used[epoch] = self.used.get(epoch, 0) + num_samples
        while self.used and self.used[first := min(self.used)] >= wanted:
            del self.used[first]
            due, version = self.validation.due, self.server.version
            weights = due[-1].weights if due and due[-1].version == version else self.server.weights.copy()
            self.validation.begin(EpochEnd(first, version, weights))
            self.server.is_paused |= len(self.validation.pending) > MAX_DUE


class RunValidation:
    """The validations of one run.

    Args:
        job: job of the run.
        journal: journal of the run.
        speeds: speeds of the nodes at work.
        nodes: all nodes that the master knows.
        send: sends a message to a connection.
        clock: seconds.

    Attributes:
        pending: validations that are due or in progress.
    """

    def __init__(
        self,
        job: Job,
        journal: RunJournal,
        speeds: RunSpeeds,
        nodes: Nodes,
        send: Send,
        clock: Callable[[], float],
    ) -> None:
        self._job, self._journal, self._speeds = job, journal, speeds
        self._nodes, self._send, self._clock = nodes, send, clock
        self._validations = Validations(job, SystemRandom().randrange)
        self.pending = self._validations.pending

    @property
    def due(self) -> list[EpochEnd]:
        """Ends of epochs whose validation is not finished."""
        return self._validations.due

    def begin(self, end: EpochEnd) -> None:
        """Validate the weights at the end of an epoch."""
        if self._job.num_validation:
            self._validations.add(end)
            self.give_out()
        else:
            self._journal.epoch_ended(end.version, end.epoch)

    def give_out(self, *, reassign_late: bool = False) -> None:
        """Assign the slices that have no node to the nodes at work."""
        if self._validations.due:
            costs, leaving = self._speeds.validators, self._speeds.leaving
            slices = self._validations.give_out(costs, self._clock(), leaving=leaving, reassign_late=reassign_late)
            self._send_slices(slices)
            self._conclude(self._validations.finished(self._clock()))

    def contributed(self, name: str) -> None:
        """Note a contribution of a node; its slices go to others if it should have answered before."""
        if self._validations.contributed(name):
            self.give_out()

    def remind(self, node: NodeRecord) -> None:
        """Send a node its open slices again."""
        self._send_slices(self._validations.slices_of(node.name))

    def has_slices(self, node: NodeRecord) -> bool:
        """Return whether a node has unanswered slices."""
        return bool(self._validations.slices_of(node.name))

    def answered(self, node: NodeRecord, header: Validated) -> tuple[bool, list[tuple[NodeRecord, str]]]:
        """Take the answer for a slice; return whether it was awaited, and faulty nodes with what they answered.

        Raises:
            BadFrame: the answer cannot be true.
        """
        if objection := self._validations.objection(node.name, header):
            raise BadFrame(objection)
        now = self._clock()
        is_news, validation = self._validations.answer(header, now)
        self._send_slices(self._validations.compare(node.name, header, list(self._speeds.validators)))
        faulty = [(self._nodes.by_name[name], reason) for name, reason in self._validations.faulty]
        self._validations.faulty.clear()
        self._conclude(validation or self._validations.finished(now))
        return is_news, faulty

    def _conclude(self, validation: Validation | None) -> None:
        """Add a validation that has ended; begin the next one, if epochs are shorter than their validation."""
        if validation is not None:
            self._journal.validated(validation)
            self.give_out()

    def _send_slices(self, slices: Iterable[SlicesForNode]) -> None:
        for name, header, weights in slices:
            node = self._nodes.by_name[name]
            node.steps_left += sum(ceil(one.size / self._job.agreement.batch) for one in header.slices)
            self._send(node.peer, header, [weights])
