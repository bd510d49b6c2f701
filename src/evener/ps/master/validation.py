"""Validations of a run, leased in slices to the nodes at work, with the sums so far.

The validation data are divided among the workers in proportion to their speeds; a slice of a lost or late worker is
assigned to another one. The first answer for a slice counts. In every validation a second worker computes one slice,
drawn at random: see `CrossCheck`. This module does not send: it returns messages.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import NamedTuple

from msgspec.structs import replace

from evener.agreements.layout import Flat
from evener.oracle.apportion import NodeCost, apportion
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Validate, Validated, ValidationSlice
from evener.records.record import Validation


class EpochEnd(NamedTuple):
    """The version and a copy of the weights at the end of an epoch."""

    epoch: int
    version: int
    weights: Flat


class ValidationPass:
    """One pass over the validation data.

    Args:
        num_samples: samples of the validation data.
        costs: costs of all nodes at work, by name.
        first_number: number of the first slice.
    """

    def __init__(self, num_samples: int, costs: Mapping[str, NodeCost], first_number: int) -> None:
        self._num_samples = num_samples
        self._open: dict[int, tuple[ValidationSlice, str]] = {}
        self._assigned: dict[int, set[str]] = {}
        self._answers: dict[int, SliceAnswer] = {}
        first = 0
        for name, size in zip(costs, apportion(num_samples, list(costs.values())), strict=True):
            if size:
                number = first_number + len(self._open)
                self._open[number] = ValidationSlice(number, first, size), name
                self._assigned[number] = {name}
                first += size
        self.next_number = first_number + len(self._open)

    @property
    def is_complete(self) -> bool:
        """Whether all slices are answered."""
        return not self._open

    @property
    def loss(self) -> float:
        """Mean loss of a complete pass."""
        return sum(_number(one.loss) for one in self._answers.values()) / self._num_samples

    @property
    def accuracy(self) -> float:
        """Accuracy of a complete pass, in [0, 1]."""
        return sum(one.correct for one in self._answers.values()) / self._num_samples

    def slices_of(self, name: str) -> list[ValidationSlice]:
        """Return the open slices of `name`."""
        return [part for part, owner in self._open.values() if owner == name]

    @property
    def parts(self) -> list[tuple[ValidationSlice, str]]:
        """Open slices, with their nodes."""
        return list(self._open.values())

    def correct(self, number: int, truth: SliceAnswer) -> None:
        """Replace the answer for a slice by the true one."""
        self._answers[number] = truth

    @property
    def owners(self) -> list[str]:
        """Nodes with open slices, each once, in order of the slices."""
        return list(dict.fromkeys(owner for _, owner in self._open.values()))

    def objection(self, number: int, name: str, correct: float) -> str:
        """Say why an answer of `name` cannot be true, if its slice is open; empty if it can."""
        if number not in self._open:
            return ""
        if name not in self._assigned[number]:
            return f"it answers for slice {number}, which was not assigned to it"
        part, _ = self._open[number]
        return "" if correct <= part.size else f"it has {correct:g} right answers for {part.size} samples"

    def answer(self, number: int, loss: float | None, correct: float) -> bool:
        """Take an answer; return whether the slice was open."""
        if self._open.pop(number, None) is None:
            return False
        self._answers[number] = SliceAnswer(loss, correct)
        return True

    def lease_again(self, owners: Collection[str], to: Sequence[str]) -> list[tuple[ValidationSlice, str]]:
        """Assign the open slices of `owners` to others, in turn; return the new assignments."""
        moved = []
        for turn, (part, owner) in enumerate([entry for entry in self._open.values() if entry[1] in owners]):
            others = [name for name in to if name != owner]
            others = [name for name in others if name not in self._assigned[part.number]] or others
            if others:
                self._open[part.number] = moved_to = part, others[turn % len(others)]
                self._assigned[part.number].add(moved_to[1])
                moved.append(moved_to)
        return moved


def _number(loss: float | None) -> float:
    return loss if loss is not None and isfinite(loss) else float("nan")


@dataclass(slots=True)
class _Pending:
    """A validation that is due or in progress.

    Attributes:
        end: end of an epoch.
        underway: pass over the data, once it has begun.
        begun: time when it began.
        checked: slice that a second node computes.
        check: answers for that slice; None if they are not awaited.
    """

    end: EpochEnd
    underway: ValidationPass | None = None
    begun: float = 0.0
    checked: ValidationSlice | None = None
    check: CrossCheck | None = None

    def awaited_checkers(self, names: Iterable[str]) -> list[str]:
        """Return the nodes of `names` whose answers for the checked slice are awaited."""
        return [] if self.check is None else [name for name in names if name not in self.check.answers]


class SlicesForNode(NamedTuple):
    """Slices to send to a node, and the weights to validate: once, since its link may be slow."""

    name: str
    header: Validate
    weights: memoryview


class Validations:
    """All validations of one run, one after the other.

    Args:
        job: job of the run.
        choose: returns a random number below its argument; None if no slice is to be checked.

    Attributes:
        faulty: faulty nodes with what they answered, for the caller to expel.
        pending: validations that are due; the first one may be in progress.
    """

    def __init__(self, job: Job, choose: Callable[[int], int] | None = None) -> None:
        self._job, self._choose = job, choose
        self.faulty: list[tuple[str, str]] = []
        self.pending: deque[_Pending] = deque()
        self._next_slice = 0
        self._asked: dict[str, int] = {}
        self._contributions: dict[str, int] = {}
        self._withholding: set[str] = set()

    @property
    def due(self) -> list[EpochEnd]:
        """Ends of epochs whose validation is not finished."""
        return [pending.end for pending in self.pending]

    def add(self, end: EpochEnd) -> None:
        """Add the weights at the end of an epoch."""
        self.pending.append(_Pending(end))

    def contributed(self, name: str) -> bool:
        """Count a contribution of a node; return whether the node withholds its answer for a slice.

        A node validates before it works on leases that it gets after the slice. It may have had as many as the depth.
        A node that withheld an answer gets no more slices if there are others.
        """
        pending = self.pending[0] if self.pending else None
        if pending is None or pending.underway is None or name not in self._contributions:
            return False
        self._contributions[name] += 1
        is_awaited = name in pending.underway.owners or name in pending.awaited_checkers(self._asked)
        if not is_awaited or self._contributions[name] <= self._job.agreement.depth:
            return False
        self._withholding.add(name)
        return True

    def _trusted(self, names: Iterable[str]) -> list[str]:
        """Return the names without those of nodes that withheld an answer, if there are others."""
        names = list(names)
        return [name for name in names if name not in self._withholding] or names

    def give_out(
        self, costs: Mapping[str, NodeCost], now: float, *, leaving: Collection[str] = (), reassign_late: bool = False
    ) -> list[SlicesForNode]:
        """Begin the next validation, or assign the slices of lost, withholding (or late) nodes to others.

        Args:
            costs: costs of all nodes at work that may get slices, by name.
            now: seconds.
            leaving: other nodes at work, which keep the slices that they have.
            reassign_late: whether nodes that have not answered yet count as lost.
        """
        if not self.pending or not costs:
            return []
        pending, trusted = self.pending[0], self._trusted(costs)
        if pending.underway is None:
            costs = {name: costs[name] for name in trusted}
            pending.underway = ValidationPass(self._job.num_validation, costs, self._next_slice)
            pending.begun, self._next_slice = now, pending.underway.next_number
            self._contributions.clear()
            return self._messages(pending.underway.parts + self._begin_check(pending, trusted), pending)
        lost = {name for name in (*pending.underway.owners, *self._asked) if name not in (*trusted, *leaving)}
        away = pending.underway.owners if reassign_late else lost
        moved = pending.underway.lease_again(away, trusted)
        if lost or reassign_late:
            pending.check = None  # not worth waiting for
        return self._messages(moved, pending)

    def slices_of(self, name: str) -> list[SlicesForNode]:
        """Return the message with the open slices of a node; none if it has none."""
        pending = self.pending[0] if self.pending else None
        if pending is None or pending.underway is None:
            return []
        return self._messages([(part, name) for part in pending.underway.slices_of(name)], pending)

    def objection(self, name: str, header: Validated) -> str:
        """Say why an answer of `name` cannot be true; empty if it can."""
        underway = self.pending[0].underway if self.pending else None
        return "" if underway is None else underway.objection(header.number, name, header.correct)

    def compare(self, name: str, header: Validated, names: Sequence[str]) -> list[SlicesForNode]:
        """Compare an answer of `name` with another node's; return the slices to send to `names` now."""
        pending = self.pending[0] if self.pending else None
        if pending is None or pending.check is None or pending.checked is None:
            return []
        check, part, said = pending.check, pending.checked, SliceAnswer(header.loss, header.correct)
        if header.number not in (part.number, self._asked.get(name)):
            return []
        check.answers.setdefault(name, said)
        if len(check.answers) < 2:
            return []
        if check.is_settled:
            self._settle(pending, check, part)
            return []
        third = check.next_of(self._trusted(names))
        if third is None:
            pending.check = None  # no node is left to decide
            return []
        return self._messages([self._ask(third, part)], pending)

    def answer(self, header: Validated, now: float) -> tuple[bool, Validation | None]:
        """Take an answer; return whether it was awaited, and the validation that it completes."""
        pending = self.pending[0] if self.pending else None
        if pending is None or pending.underway is None:
            return False, None
        is_news = pending.underway.answer(header.number, header.loss, header.correct)
        return is_news, self.finished(now)

    def finished(self, now: float) -> Validation | None:
        """Return the validation in progress, if all awaited answers have arrived."""
        pending = self.pending[0] if self.pending else None
        if pending is None or pending.underway is None or not pending.underway.is_complete or pending.check is not None:
            return None
        self.pending.popleft()
        return self._result(pending, pending.underway, now)

    def _begin_check(self, pending: _Pending, names: Sequence[str]) -> list[tuple[ValidationSlice, str]]:
        assert pending.underway is not None
        if self._choose is None or len(names) < 2:
            return []
        part, owner = pending.underway.parts[self._choose(len(pending.underway.parts))]
        others = [name for name in names if name != owner]
        pending.checked, pending.check = part, CrossCheck(part.size)
        self._asked.clear()
        return [self._ask(others[self._choose(len(others))], part)]

    def _ask(self, name: str, part: ValidationSlice) -> tuple[ValidationSlice, str]:
        """Assign a slice to a second node, under a number of its own."""
        number, self._next_slice = self._next_slice, self._next_slice + 1
        self._asked[name] = number
        return replace(part, number=number), name

    def _settle(self, pending: _Pending, check: CrossCheck, part: ValidationSlice) -> None:
        """Report the nodes that contradict two agreeing answers, and count the agreed answer."""
        truth = check.truth
        assert pending.underway is not None
        assert truth is not None
        pending.check = None
        for name in check.faulty_nodes():
            answer = check.answers[name]
            pending.underway.correct(part.number, truth)
            counts = f"it counted {answer.correct:g} of {part.size} as correct, and two other nodes {truth.correct:g}"
            self.faulty.append((name, counts))

    def _messages(self, assigned: Iterable[tuple[ValidationSlice, str]], pending: _Pending) -> list[SlicesForNode]:
        """Return one message to each node of these assignments."""
        parts: dict[str, list[ValidationSlice]] = {}
        for part, name in assigned:
            parts.setdefault(name, []).append(part)
            self._contributions[name] = 0
        weights = pending.end.weights.memory.data
        return [
            SlicesForNode(name, Validate(run=self._job.run, slices=tuple(slices)), weights)
            for name, slices in parts.items()
        ]

    def _result(self, pending: _Pending, done: ValidationPass, now: float) -> Validation:
        return Validation(
            step=pending.end.version,
            epoch=pending.end.epoch,
            loss=done.loss if isfinite(done.loss) else sys.float_info.max,
            accuracy=done.accuracy if self._job.has_accuracy else None,
            seconds=now - pending.begun,
        )


TOLERANCE = 0.05
"""Relative tolerance of losses, which includes half precision."""
SAMPLES_APART = 2
PART_APART = 0.02
"""Tolerance of correct answers: a number of samples, or a share of them."""


class SliceAnswer(NamedTuple):
    """A node's answer for a slice.

    Attributes:
        loss: sum over its samples; None if it is not finite.
        correct: number of correct answers.
    """

    loss: float | None
    correct: float

    def agrees_with(self, other: SliceAnswer, size: int) -> bool:
        """Return whether both answers may be true for the same weights and samples."""
        if abs(self.correct - other.correct) > max(SAMPLES_APART, PART_APART * size):
            return False
        if self.loss is None or other.loss is None:
            return self.loss == other.loss
        return isclose(self.loss, other.loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE * size)


class CrossCheck:
    """One slice, and the answers of the nodes that compute it.

    Args:
        size: samples of the slice.

    Attributes:
        answers: answers by node.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.answers: dict[str, SliceAnswer] = {}

    @property
    def is_settled(self) -> bool:
        """Whether two answers agree."""
        return self.truth is not None

    @property
    def truth(self) -> SliceAnswer | None:
        """An answer that two nodes agree on; None if there is none."""
        answers = list(self.answers.values())
        for number, one in enumerate(answers):
            if any(one.agrees_with(other, self._size) for other in answers[number + 1 :]):
                return one
        return None

    def faulty_nodes(self) -> list[str]:
        """Return the nodes that contradict two others; none while no two agree."""
        truth = self.truth
        if truth is None:
            return []
        return [name for name, one in self.answers.items() if not one.agrees_with(truth, self._size)]

    def next_of(self, names: Sequence[str]) -> str | None:
        """Return one of `names` that has not answered; None if all have."""
        return next((name for name in names if name not in self.answers), None)
