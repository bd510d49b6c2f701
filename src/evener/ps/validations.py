"""The validations of a run, one after the other: which is due, who computes which slice of it, what came of it.

`validation` divides one pass over the data; this keeps the passes, sends the slices and hands out the results. No
sockets: what has to be sent is given to the post.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from evener.ps.job import Job
from evener.ps.messages import Validate, Validated
from evener.ps.post import Post
from evener.ps.validation import Assessment, Slice
from evener.record import Validation
from evener.sync.layout import Flat


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


class Validations:
    """All validations of one run.

    Args:
        job: of the run.
        post: takes the slices to the nodes.
        clock: seconds.
        costs: gives the seconds a sample of everybody who works now, by name.
    """

    def __init__(
        self, job: Job, post: Post, clock: Callable[[], float], costs: Callable[[], Mapping[str, float]]
    ) -> None:
        self._job, self._post, self._clock, self._costs = job, post, clock, costs
        self._pending: deque[_Pending] = deque()
        self._next_slice = 0

    @property
    def due(self) -> tuple[int, ...]:
        """Epochs of those that have not ended."""
        return tuple(pending.epoch for pending in self._pending)

    def add(self, epoch: int, version: int, weights: Flat) -> None:
        """Have these weights validated; they are copied."""
        self._pending.append(_Pending(epoch, version, weights.copy().memory.data))
        self.give_out()

    def give_out(self, *, also_of_the_late: bool = False) -> None:
        """Begin the next one, or give what the lost (or the late) have not answered for to others."""
        costs = self._costs()
        if not self._pending or not costs:
            return
        pending = self._pending[0]
        if pending.assessment is None:
            pending.assessment = Assessment(self._job.num_validation, costs, self._next_slice)
            pending.begun, self._next_slice = self._clock(), pending.assessment.next_number
            self.send(pending.assessment.owners)
            return
        away = [name for name in pending.assessment.owners if also_of_the_late or name not in costs]
        for part, name in pending.assessment.lease_again(away, list(costs)):
            self._send(name, part, pending)

    def send(self, names: Iterable[str]) -> None:
        """Send these nodes what they still have to answer for."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.assessment is None:
            return
        for name in dict.fromkeys(names):
            for part in pending.assessment.slices_of(name):
                self._send(name, part, pending)

    def answer(self, header: Validated) -> tuple[bool, Validation | None]:
        """A slice has been answered for: whether it was awaited, and the validation that it completes."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.assessment is None:
            return False, None
        is_news = pending.assessment.answer(header.number, header.loss, header.correct)
        if not pending.assessment.is_complete:
            return is_news, None
        self._pending.popleft()
        return is_news, self._result(pending, pending.assessment)

    def _send(self, name: str, part: Slice, pending: _Pending) -> None:
        header = Validate(run=self._job.run, number=part.number, first=part.first, size=part.size)
        self._post.send(name, header, [pending.weights])

    def _result(self, pending: _Pending, assessment: Assessment) -> Validation:
        return Validation(
            step=pending.version,
            epoch=pending.epoch,
            loss=assessment.loss if isfinite(assessment.loss) else sys.float_info.max,
            accuracy=assessment.accuracy if self._job.has_accuracy else None,
            seconds=self._clock() - pending.begun,
        )
