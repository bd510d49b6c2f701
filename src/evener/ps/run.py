"""The conduct of one run at the master: the parameter server, validation and the ledger, joined to those who work.

No sockets: nodes are names, and what has to be sent is given to the post. What a run learns about nodes (a good
update, a refused one, a late one) it puts into `happenings`, for membership to decide upon; it never decides itself
who takes part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf

from evener.errors import EvenerError, NonFiniteLoss, TrainingFailed
from evener.oracle.apportion import Worker
from evener.ps.decision import What
from evener.ps.diligence import Diligence
from evener.ps.entry import Work
from evener.ps.job import Job, encode_job
from evener.ps.ledger import Ledger
from evener.ps.members import Member
from evener.ps.messages import Contribution, Prepare, ServerReply, Validated
from evener.ps.post import Post
from evener.ps.validations import Validations
from evener.record import Event
from evener.sync.messages import Judgement, ServerOutput, Update, WorkerReply
from evener.sync.server import Server
from evener.sync.speed_estimator import costs_of

_MOST_REFUSALS = 3
"""A worker, in a row and without a good update of anybody, before training is taken for diverged."""


class Run:
    """One run.

    Args:
        job: to be done.
        server: that agrees on the weights.
        ledger: that remembers.
        post: takes what has to leave.
        clock: seconds.
        patience: seconds that everybody waits for one.

    Attributes:
        happenings: what to tell membership: what, and the node's name.
        failure: why the run cannot go on, if it cannot.
        has_begun: whether work is given out.
    """

    def __init__(
        self, job: Job, server: Server, ledger: Ledger, post: Post, clock: Callable[[], float], patience: float
    ) -> None:
        self.job, self.server, self.ledger = job, server, ledger
        self.happenings: deque[tuple[What, str]] = deque()
        self.failure: EvenerError | None = None
        self.has_begun = False
        self._post, self._clock, self._patience = post, clock, patience
        self._diligence = Diligence(patience, clock())
        self._used: dict[int, int] = {}
        self._validations = Validations(job, post, clock, self._seconds_per_sample)
        self._refused_in_a_row = 0
        self._first_ready = inf
        self._updated_at = clock()

    def resume(self, used: Mapping[int, int], due: Sequence[int]) -> None:
        """Go on with the run of a master that was killed: with these samples used, and these epochs to validate."""
        self._used = dict(used)
        for epoch in due:
            self._validate(epoch)  # with the present weights: those of the epoch's end may be gone
        self.note("master restarted", f"the master goes on from update {self.server.version}")

    @property
    def used(self) -> dict[int, int]:
        """Samples used of each epoch that has begun and not ended."""
        return dict(self._used)

    @property
    def due(self) -> tuple[int, ...]:
        """Epochs whose validation has not ended."""
        return self._validations.due

    @property
    def is_complete(self) -> bool:
        """Whether everything is done, validation too."""
        return self.server.is_over and not self.due

    @property
    def costs(self) -> dict[str, Worker]:
        """What samples cost everybody who works."""
        members = self.server.members
        return {one.name: cost for one, cost in zip(members, costs_of([one.speed for one in members]), strict=True)}

    def _seconds_per_sample(self) -> dict[str, float]:
        return {name: cost.unit_seconds for name, cost in self.costs.items()}

    def take_in(self, member: Member) -> None:
        """Let a node that is a member now make ready, or work if it is ready and work has begun."""
        if self.job.run in member.unfit:
            return
        if member.ready != self.job.run:
            member.doing = "prepares"
            self._post.send(member.name, Prepare(run=self.job.run), [encode_job(self.job)])
            return
        member.doing = "works" if self.has_begun else "waits for the others to make ready"
        if self.has_begun:
            self._admit(member.name)

    def ready(self, member: Member, unit_seconds: float) -> None:
        """A node is ready."""
        self.server.worker(member.name).speed.benchmark(unit_seconds)
        member.ready = self.job.run
        self._first_ready = min(self._first_ready, self._clock())
        self.take_in(member)

    def unfit(self, member: Member, reason: str) -> None:
        """A node cannot take part."""
        member.unfit.add(self.job.run)
        member.ready, member.doing = "", f"cannot take part: {reason}"
        self.note("left out", f"node {member.name} cannot take part: {reason}")
        self.lose(member.name)

    def begin(self, present: Sequence[Member]) -> None:
        """Let work begin once all who are here are ready, or one has waited for the others for the patience."""
        run = self.job.run
        fit = [member for member in present if run not in member.unfit]
        ready = [member for member in fit if member.ready == run]
        if present and not fit:
            reasons = "; ".join(f"node {member.name} {member.doing}" for member in present)
            self.failure = TrainingFailed(f"no node can take part in the run: {reasons}")
        waited = self._clock() - self._first_ready
        if ready and not self.has_begun and (len(ready) == len(fit) or waited > self._patience):
            self.has_begun, self.server.quorum = True, len(ready)
            for member in ready:
                self.take_in(member)
            self.server.quorum = 1  # whoever comes or goes from now on, the others go on

    def _admit(self, name: str) -> None:
        if not self.server.members:
            self._updated_at = self._clock()  # nobody worked until now
        self.ledger.know(name)
        self._follow(self.server.admit(name))
        self._validations.send([name])
        self._validations.give_out()

    def lose(self, name: str) -> None:
        """Have what a node has begun done by others."""
        self._diligence.forget(name)
        self._follow(self.server.dismiss(name))
        self._validations.give_out()

    def inbox(self, name: str, contribution: Contribution, num_bytes: int) -> memoryview | None:
        """Where the bytes of a contribution belong; None if they are not wanted."""
        if contribution.run != self.job.run or num_bytes != self.server.push_bytes:
            return None
        return self.server.inbox(name, contribution.push.number)

    def arrived(self, name: str, contribution: Contribution, num_bytes: int) -> None:
        """So much of a contribution is here."""
        self.gets_on(name)
        self.server.arrived(name, contribution.push.number, num_bytes)

    def contribute(self, name: str, contribution: Contribution, num_bytes: int) -> None:
        """A contribution is here."""
        if contribution.run != self.job.run:
            return
        push = contribution.push
        if push.number in self.server.worker(name).leases:
            self.gets_on(name)
        self._follow(self.server.push(name, push, num_bytes))

    def assessed(self, name: str, header: Validated) -> None:
        """A slice of the validation data has been answered for."""
        if header.run != self.job.run:
            return
        is_news, validation = self._validations.answer(header)
        if is_news:
            self.gets_on(name)
        if validation is not None:
            self._updated_at = self._clock()  # the time of validation is nobody's update
            self.ledger.validations.append(validation)
            self._post.tell(validation)
            self._validations.give_out()  # of the next one, if epochs are shorter than their validation

    def gets_on(self, name: str) -> None:
        """A node has done a part of its work."""
        self._diligence.sign(name, self._clock())

    def tick(self) -> None:
        """Look for those for whom everybody has waited long enough."""
        now = self._clock()
        busy = self._step_seconds()
        for name in filter(self._post.is_sending, busy):
            self._diligence.sign(name, now)
        if 0 < len(busy) < len(self.server.members) and not self.server.is_over:
            for name in self._diligence.late(busy, now):
                self.server.worker(name).speed.was_late()
                self.happenings.append(("late", name))
        if now - self._diligence.latest > self._patience:
            self._diligence.latest = now
            self._validations.give_out(also_of_the_late=True)

    def _step_seconds(self) -> dict[str, float]:
        """What a step is believed to take everybody who is at work."""
        costs = self._seconds_per_sample()
        held = ((one.name, one.oldest_lease) for one in self.server.members)
        return {name: costs[name] * lease.num_samples / lease.num_steps for name, lease in held if lease}

    def note(self, kind: str, message: str) -> None:
        """Write an event down and tell it."""
        event = Event(step=self.server.version, kind=kind, message=message)
        self.ledger.events.append(event)
        self._post.tell(event)

    def _follow(self, output: ServerOutput) -> None:
        """Note what came of a message, and send the answers; validation goes before them, to be done first."""
        for judgement in output.judgements:
            self._judged(judgement)
        for update in output.updates:
            self._updated(update)
        for reply in output.replies:
            self._answer(reply)

    def _answer(self, reply: WorkerReply) -> None:
        name, image = reply.worker, reply.image
        if reply.answer.lease is not None:
            self.gets_on(name)
        if image is not None:
            self.ledger.sent(name, len(image), self.job.layout.num_bytes - len(image))
        self._post.send(name, ServerReply(run=self.job.run, answer=reply.answer), () if image is None else (image,))

    def _judged(self, judgement: Judgement) -> None:
        name, lease, is_here = judgement.worker, judgement.lease, self.server.worker(judgement.worker).is_here
        if judgement.verdict == "applied":
            self._refused_in_a_row = 0
            sent = self.server.push_bytes
            saved = self.job.layout.num_bytes - sent
            self.ledger.contributed(name, Work(judgement.num_samples, judgement.seconds, sent=sent, saved=saved))
            if is_here:
                self.happenings.append(("contributed", name))
        elif judgement.verdict == "refused":
            self._refused_in_a_row += 1
            self.note("refused", f"the update of node {name} was refused: {judgement.reason}")
            if is_here:
                self.happenings.append(("refused", name))
            if lease is not None:
                self._use_up(lease.samples.epoch, judgement.num_samples)
            if self._refused_in_a_row >= _MOST_REFUSALS * max(1, len(self.server.members)):
                self.failure = NonFiniteLoss(name, self.server.version + 1, float("nan"), f": {_DIVERGED}")

    def _updated(self, update: Update) -> None:
        now = self._clock()
        self.ledger.updated(update, now - self._updated_at)
        self._updated_at = now
        self._use_up(update.epoch, update.num_samples)

    def _use_up(self, epoch: int, num_samples: int) -> None:
        """Note that samples of an epoch are used, whether learned from or refused; with the last one, validate."""
        used = self._used[epoch] = self._used.get(epoch, 0) + num_samples
        if used < (self.job.workload.num_samples or 0):
            return
        del self._used[epoch]
        self._validate(epoch)

    def _validate(self, epoch: int) -> None:
        """Have the present weights validated."""
        if self.job.num_validation:
            self._validations.add(epoch, self.server.version, self.server.weights)


_DIVERGED = "every update of every node is refused, training has diverged; a lower learning rate may help"
