"""A node's part in one run: the leases that it holds, and what it has sent and not heard of.

    answer with a lease -> work -> contribution -> answer with a lease -> ...

Over a new connection everything that was not answered is sent again; the master states again what it had said. So both
sides may say things twice, and a lease is worked on once.
"""

from __future__ import annotations

from collections import deque

from evener.ps.engine import NodeEngine
from evener.ps.inbox import Inbox, ThreadedInbox
from evener.ps.job import Job
from evener.ps.messages import Contribution, ServerReply, Validate, Validated
from evener.sync.compression import as_bytes
from evener.sync.layout import Flat
from evener.sync.messages import Lease, Push
from evener.sync.worker import WorkerReplica


class WorkerSession:
    """What a node does for one job, from its first lease to the last.

    Args:
        job: see `Job`.
        engine: ready for it.
    """

    def __init__(self, job: Job, engine: NodeEngine) -> None:
        self.job, self._engine = job, engine
        self._replica = WorkerReplica(engine, job.agreement)
        self._leases: deque[Lease] = deque()
        self._unanswered: dict[int, tuple[Push, memoryview]] = {}

    def hear(self, told: ServerReply, image: memoryview | None) -> None:
        """Take in what the server said."""
        answer = told.answer
        if answer.answers is not None:
            self._unanswered.pop(answer.answers, None)
        self._replica.take(answer, image)
        if answer.is_anew:
            self._leases.clear()
        if answer.lease is not None and not self._knows(answer.lease.number):
            self._leases.append(answer.lease)

    @property
    def can_work(self) -> bool:
        """Whether there is something to do now."""
        return bool(self._leases) and len(self._replica.underway) < self.job.agreement.depth

    def work(self, inbox: Inbox | ThreadedInbox) -> None:
        """Do what the oldest lease says, and send it."""
        push, image = self._replica.work(self._leases.popleft())
        self._unanswered[push.number] = push, image
        inbox.send(Contribution(run=self.job.run, push=push), [image])

    def resend(self, inbox: Inbox | ThreadedInbox) -> None:
        """Say again, over a new connection, what was not answered; the master names the leases that still hold."""
        for push, image in self._unanswered.values():
            inbox.send(Contribution(run=self.job.run, push=push), [image])

    def drop_leases(self) -> None:
        """Forget what there was to do: others do it."""
        self._leases.clear()

    def validate(self, asked: Validate, weights: memoryview) -> Validated:
        """What the weights make of a slice of the validation data."""
        flat = Flat(self.job.layout, as_bytes(weights))
        loss, correct = self._engine.validate(flat, asked.first, asked.size)
        return Validated(run=self.job.run, number=asked.number, loss=loss, correct=correct)

    def close(self) -> None:
        """The run is over."""
        self._engine.close()

    def _knows(self, number: int) -> bool:
        return number in self._replica.underway or any(lease.number == number for lease in self._leases)
