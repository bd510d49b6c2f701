"""The conduct of one run at the master: the parameter server, validation and the ledger, joined to those who work.

No sockets: nodes are names, and what has to be sent is given to the post. What a run learns about nodes (a good
update, a refused one, a late one) it puts into `happenings`, for membership to decide upon; it never decides itself
who takes part.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import Protocol

import msgspec

from evener.errors import EvenerError, NonFiniteLoss, TrainingFailed
from evener.oracle import Worker
from evener.record import Event, Validation
from evener.star.decision import What
from evener.star.job import Job, encode_job
from evener.star.ledger import Ledger, Work
from evener.star.members import Member
from evener.star.messages import Assess, Assessed, Contribution, Letter, Prepare, Told
from evener.star.validation import Assessment
from evener.star.words import Word
from evener.sync.messages import Lease, Outcome, Push, Reply, Update
from evener.sync.server import Server
from evener.wire.frame import Buffer

_MOST_REFUSALS = 3
"""A worker, in a row and without a good update of anybody, before training is taken for diverged."""

_MOST_SLOWING = 4.0
"""By which one measurement may exceed what is known of a node's seconds a sample."""
_NEWEST = 0.25
"""Weight of the newest measurement of these, as at the server."""


class Post(Protocol):
    """Where a run puts what has to leave."""

    def send(self, name: str, header: Letter, buffers: Sequence[Buffer] = ()) -> None:
        """Send to a node, if it has a connection."""
        ...

    def tell(self, word: Word) -> None:
        """Tell whoever watches the run."""
        ...


@dataclass
class _Pending:
    """A validation that is due or under way.

    Attributes:
        epoch: that has ended.
        version: of the weights.
        weights: a copy of them.
        assessment: once it is under way.
        begun: when that was.
    """

    epoch: int
    version: int
    weights: memoryview
    assessment: Assessment | None = None
    begun: float = 0.0


class Run:
    """One run.

    Args:
        job: to be done.
        server: that agrees on the weights.
        ledger: that remembers.
        post: see above.
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
        self._unit_seconds: dict[str, float] = {}
        self._leases: dict[str, dict[int, Lease]] = {}
        self._taken: dict[str, dict[int, Lease]] = {}
        self._used: dict[int, int] = {}
        self._validations: deque[_Pending] = deque()
        self._next_slice = 0
        self._refused_in_a_row = 0
        self._first_ready = inf
        self._progress = self._updated_at = clock()

    def resume(
        self, used: Mapping[int, int], due: Sequence[tuple[int, int]], unit_seconds: Mapping[str, float]
    ) -> None:
        """Go on with the run of a master that was killed: with these samples used, and these validations due."""
        self._used, self._unit_seconds = dict(used), dict(unit_seconds)
        for epoch, version in due:
            if version == self.server.version:  # the weights of others are gone
                self._validate(epoch)
        self.note("master restarted", f"the master goes on from update {self.server.version}")

    @property
    def used(self) -> dict[int, int]:
        """Samples used of each epoch that has begun and not ended."""
        return dict(self._used)

    @property
    def due(self) -> tuple[tuple[int, int], ...]:
        """Epoch and version of the weights of validations that have not ended."""
        return tuple((pending.epoch, pending.version) for pending in self._validations)

    @property
    def is_complete(self) -> bool:
        """Whether everything is done, validation too."""
        return not self._validations and self.server.is_over

    @property
    def costs(self) -> dict[str, Worker]:
        """What samples cost everybody who works."""
        return {name: Worker(unit_seconds=self._unit_seconds[name]) for name in self.server.workers}

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
        if isfinite(unit_seconds) and unit_seconds > 0:
            self._unit_seconds[member.name] = unit_seconds
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
            self.has_begun = True
            for member in ready:
                self.take_in(member)

    def _admit(self, name: str) -> None:
        if not self.server.workers:
            self._updated_at = self._clock()  # nobody worked until now
        self.ledger.know(name)
        known = self._unit_seconds.values()
        seconds = self._unit_seconds.setdefault(name, median(known) if known else 1.0)
        self._follow(self.server.admit(name, Worker(unit_seconds=seconds)))
        self._send_slices([name])
        self._give_out_slices()

    def lose(self, name: str) -> None:
        """Have what a node has begun done by others."""
        self._leases.pop(name, None)
        self._taken.pop(name, None)
        self._follow(self.server.dismiss(name))
        self._give_out_slices()

    def inbox(self, name: str, contribution: Contribution, num_bytes: int) -> memoryview | None:
        """Where the bytes of a contribution belong; None if they are not wanted."""
        if contribution.run != self.job.run or num_bytes != self.server.push_bytes:
            return None
        return self.server.inbox(name, contribution.push.number)

    def arrived(self, name: str, contribution: Contribution, num_bytes: int) -> None:
        """So much of a contribution is here."""
        self.server.arrived(name, contribution.push.number, num_bytes)

    def contribute(self, name: str, contribution: Contribution, num_bytes: int) -> None:
        """A contribution is here."""
        if contribution.run != self.job.run:
            return
        push = contribution.push
        lease = self._leases.get(name, {}).pop(push.number, None)
        if lease is not None:
            push = self._measured(name, push, lease.num_samples)
            self._progress = self._clock()
            self._taken.setdefault(name, {})[push.number] = lease
            saved = self.job.layout.num_bytes - num_bytes
            self.ledger.contributed(name, Work(lease.num_samples, push.seconds, sent=num_bytes, saved=saved))
        self._follow(self.server.push(name, push, num_bytes))

    def _measured(self, name: str, push: Push, num_samples: int) -> Push:
        """Learn a node's speed; `push` with seconds that are believed: who was stopped once is not slow for good."""
        before = self._unit_seconds[name]
        seconds = min(push.seconds / num_samples, _MOST_SLOWING * before)
        self._unit_seconds[name] = before + _NEWEST * (seconds - before)
        is_usual = seconds < _MOST_SLOWING * before
        return push if is_usual else msgspec.structs.replace(push, seconds=seconds * num_samples)

    def assessed(self, header: Assessed) -> None:
        """A slice of the validation data has been answered for."""
        pending = self._validations[0] if self._validations else None
        if header.run != self.job.run or pending is None or pending.assessment is None:
            return
        if pending.assessment.answer(header.number, header.loss, header.correct):
            self._progress = self._clock()
        if pending.assessment.is_complete:
            self._validated(self._validations.popleft(), pending.assessment)
            self._give_out_slices()  # of the next one, if epochs are shorter than their validation

    def tick(self) -> None:
        """Look for those for whom everybody has waited long enough."""
        now = self._clock()
        if now - self._progress <= self._patience:
            return
        self._progress = now
        busy = [name for name in self.server.workers if self._leases.get(name)]
        if 0 < len(busy) < len(self.server.workers) and not self.server.is_over:
            self.happenings += [("late", name) for name in busy]
        self._give_out_slices(also_of_the_late=True)

    def note(self, kind: str, message: str) -> None:
        """Write an event down and tell it."""
        event = Event(step=self.server.version, kind=kind, message=message)
        self.ledger.events.append(event)
        self._post.tell(event)

    def _follow(self, outcome: Outcome) -> None:
        """Note what came of a message, and send the answers; validation goes before them, to be done first."""
        for update in outcome.updates:
            self._updated(update)
        for reply in outcome.replies:
            if reply.answer.verdict is not None and reply.answer.answers is not None:
                self._judged(reply.worker, reply.answer.answers, reply.answer.verdict, reply.answer.reason)
        for reply in outcome.replies:
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        name, lease, image = reply.worker, reply.answer.lease, reply.image
        if lease is not None:
            self._leases.setdefault(name, {})[lease.number] = lease
            self._progress = self._clock()
        if image is not None:
            self.ledger.sent(name, len(image), self.job.layout.num_bytes - len(image))
        self._post.send(name, Told(run=self.job.run, answer=reply.answer), () if image is None else (image,))

    def _judged(self, name: str, number: int, verdict: str, reason: str) -> None:
        lease = self._taken.get(name, {}).pop(number, None)
        if verdict == "applied":
            self._refused_in_a_row = 0
            self.happenings.append(("contributed", name))
        elif verdict == "refused":
            self._refused_in_a_row += 1
            self.ledger.refused(name)
            self.note("refused", f"the update of node {name} was refused: {reason}")
            self.happenings.append(("refused", name))
            if lease is not None:
                self._use_up(lease.portion.epoch, lease.num_samples)
            if self._refused_in_a_row >= _MOST_REFUSALS * len(self.server.workers):
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
            weights = self.server.weights.copy().memory.data
            self._validations.append(_Pending(epoch, self.server.version, weights))
            self._give_out_slices()

    def _give_out_slices(self, also_of_the_late: bool = False) -> None:
        """Begin the next validation, or give what the lost (or late) have not answered for to others."""
        workers = self.costs
        if not self._validations or not workers:
            return
        pending = self._validations[0]
        if pending.assessment is None:
            unit_seconds = {name: cost.unit_seconds for name, cost in workers.items()}
            pending.assessment = Assessment(self.job.num_validation, unit_seconds, self._next_slice)
            pending.begun, self._next_slice = self._clock(), pending.assessment.next_number
            self._send_slices(pending.assessment.owners)
            return
        for owner in pending.assessment.owners:
            if owner not in workers or also_of_the_late:
                others = [name for name in workers if name != owner]
                moved = pending.assessment.lease_again(owner, others)
                self._send_slices([name for _, name in moved])

    def _send_slices(self, names: Sequence[str]) -> None:
        """Send these nodes what they still have to answer for."""
        pending = self._validations[0] if self._validations else None
        if pending is None or pending.assessment is None:
            return
        for name in dict.fromkeys(names):
            for part in pending.assessment.slices_of(name):
                header = Assess(run=self.job.run, number=part.number, first=part.first, size=part.size)
                self._post.send(name, header, [pending.weights])

    def _validated(self, pending: _Pending, assessment: Assessment) -> None:
        now = self._clock()
        validation = Validation(
            step=pending.version,
            epoch=pending.epoch,
            loss=assessment.loss if isfinite(assessment.loss) else sys.float_info.max,
            accuracy=assessment.accuracy if self.job.has_accuracy else None,
            seconds=now - pending.begun,
        )
        self._updated_at = now
        self.ledger.validations.append(validation)
        self._post.tell(validation)


_DIVERGED = "every update of every node is refused, training has diverged; a lower learning rate may help"
