"""Validations of a run, leased in slices to whoever is there: who computes what, and the sums so far.

The validation data are cut among the workers in proportion to their speeds; a slice whose worker is lost, or late, is
given to another one. A slice counts once, whoever answers for it first. In every validation one slice, drawn at random,
is computed by another one as well: see `cross_check`. No sockets: what has to be sent is returned.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from evener.oracle.apportion import Worker, apportion
from evener.ps.master.cross_check import CrossCheck, SliceAnswer
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Validate, Validated
from evener.records.record import Validation
from evener.sync.layout import Flat


class ValidationSlice(NamedTuple):
    """Samples [first, first + size) of the validation data, as the slice `number` of the run."""

    number: int
    first: int
    size: int


class EpochEnd(NamedTuple):
    """What an epoch ended with: a version of the weights, and these, which nobody changes any more."""

    epoch: int
    version: int
    weights: Flat


class ValidationPass:
    """One pass over the validation data.

    Args:
        num_samples: of the validation data.
        costs: of everybody who may compute, by name.
        first_number: of the slices.
    """

    def __init__(self, num_samples: int, costs: Mapping[str, Worker], first_number: int) -> None:
        self._num_samples = num_samples
        self._open: dict[int, tuple[ValidationSlice, str]] = {}
        self._asked: dict[int, set[str]] = {}
        self._answers: dict[int, SliceAnswer] = {}
        first = 0
        for name, size in zip(costs, apportion(num_samples, list(costs.values())), strict=True):
            if size:
                number = first_number + len(self._open)
                self._open[number] = ValidationSlice(number, first, size), name
                self._asked[number] = {name}
                first += size
        self.next_number = first_number + len(self._open)

    @property
    def is_complete(self) -> bool:
        """Whether every sample has been answered for."""
        return not self._open

    @property
    def loss(self) -> float:
        """Mean over the samples; of a complete pass."""
        return sum(_number(one.loss) for one in self._answers.values()) / self._num_samples

    @property
    def accuracy(self) -> float:
        """In [0, 1]; of a complete pass."""
        return sum(one.correct for one in self._answers.values()) / self._num_samples

    def slices_of(self, name: str) -> list[ValidationSlice]:
        """What `name` still has to answer for."""
        return [part for part, owner in self._open.values() if owner == name]

    @property
    def parts(self) -> list[tuple[ValidationSlice, str]]:
        """What has not been answered for, and who is to."""
        return list(self._open.values())

    def correct(self, number: int, truth: SliceAnswer) -> None:
        """Count what is true of a slice instead of what was said."""
        self._answers[number] = truth

    @property
    def owners(self) -> list[str]:
        """Everybody who still has to answer, each once, in order of the slices."""
        return list(dict.fromkeys(owner for _, owner in self._open.values()))

    def objection(self, number: int, name: str, correct: float) -> str:
        """Why an answer of `name` cannot be true, if its slice is open; empty if it can."""
        if number not in self._open:
            return ""
        if name not in self._asked[number]:
            return f"it answers for slice {number}, which it was not given"
        part, _ = self._open[number]
        return "" if correct <= part.size else f"it has {correct:g} right answers for {part.size} samples"

    def answer(self, number: int, loss: float | None, correct: float) -> bool:
        """Count a slice; whether it was awaited: another may have answered for it before."""
        if self._open.pop(number, None) is None:
            return False
        self._answers[number] = SliceAnswer(loss, correct)
        return True

    def lease_again(self, owners: Collection[str], to: Sequence[str]) -> list[tuple[ValidationSlice, str]]:
        """Give what `owners` have not answered for to others, in turn: who gets which slice now."""
        moved = []
        for turn, (part, owner) in enumerate([entry for entry in self._open.values() if entry[1] in owners]):
            others = [name for name in to if name != owner]
            if others:
                self._open[part.number] = moved_to = part, others[turn % len(others)]
                self._asked[part.number].add(moved_to[1])
                moved.append(moved_to)
        return moved


def _number(loss: float | None) -> float:
    return loss if loss is not None and isfinite(loss) else float("nan")


@dataclass(slots=True)
class _Pending:
    """A validation that is due or under way.

    Attributes:
        end: of an epoch.
        underway: once it has begun.
        begun: when that was.
        checked: the slice that another one computes as well.
        check: what is said of it; None if there is nothing to wait for.
    """

    end: EpochEnd
    underway: ValidationPass | None = None
    begun: float = 0.0
    checked: ValidationSlice | None = None
    check: CrossCheck | None = None


class SliceForNode(NamedTuple):
    """What has to be sent to a node: a slice, and the weights to validate."""

    name: str
    header: Validate
    weights: memoryview


class Validations:
    """All validations of one run, one after the other.

    Args:
        job: of the run.
        choose: one of so many, at random; None if no slice is to be checked.

    Attributes:
        liars: who was found to have lied, with what it said, for whoever expels them.
    """

    def __init__(self, job: Job, choose: Callable[[int], int] | None = None) -> None:
        self._job, self._choose = job, choose
        self.liars: list[tuple[str, str]] = []
        self._pending: deque[_Pending] = deque()
        self._next_slice = 0
        self._asked: dict[str, int] = {}

    @property
    def due(self) -> list[EpochEnd]:
        """What has not been validated to its end."""
        return [pending.end for pending in self._pending]

    def add(self, end: EpochEnd) -> None:
        """Have the weights that an epoch ended with validated."""
        self._pending.append(_Pending(end))

    def give_out(
        self, costs: Mapping[str, Worker], now: float, *, also_of_the_late: bool = False
    ) -> list[SliceForNode]:  # fmt: skip
        """Begin the next one, or give what the lost (or the late) have not answered for to others.

        Args:
            costs: of the samples of everybody who works now, by name.
            now: seconds.
            also_of_the_late: whether those who have not answered yet are taken for lost.
        """
        if not self._pending or not costs:
            return []
        pending = self._pending[0]
        if pending.underway is None:
            pending.underway = ValidationPass(self._job.num_validation, costs, self._next_slice)
            pending.begun, self._next_slice = now, pending.underway.next_number
            slices = [one for name in pending.underway.owners for one in self.slices_of(name)]
            return slices + self._begin_check(pending, list(costs))
        away = [name for name in pending.underway.owners if also_of_the_late or name not in costs]
        moved = pending.underway.lease_again(away, list(costs))
        if away or also_of_the_late or any(name not in costs for name in self._asked):
            pending.check = None  # not worth waiting for
        return [self._for(name, part, pending) for part, name in moved]

    def slices_of(self, name: str) -> list[SliceForNode]:
        """What a node still has to answer for."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.underway is None:
            return []
        return [self._for(name, part, pending) for part in pending.underway.slices_of(name)]

    def objection(self, name: str, header: Validated) -> str:
        """Why an answer of `name` cannot be true; empty if it can."""
        underway = self._pending[0].underway if self._pending else None
        return "" if underway is None else underway.objection(header.number, name, header.correct)

    def compare(self, name: str, header: Validated, names: Sequence[str]) -> list[SliceForNode]:
        """Hold an answer of `name`, which was counted, against another one's; what to ask of whom of `names` now."""
        pending = self._pending[0] if self._pending else None
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
        third = check.next_of(names)
        if third is None:
            pending.check = None  # nobody can decide
            return []
        return [self._ask(third, part, pending)]

    def answer(self, header: Validated, now: float) -> tuple[bool, Validation | None]:
        """A slice has been answered for: whether it was awaited, and the validation that it completes."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.underway is None:
            return False, None
        is_news = pending.underway.answer(header.number, header.loss, header.correct)
        return is_news, self.finished(now)

    def finished(self, now: float) -> Validation | None:
        """The validation under way, if everything is answered for that is waited for."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.underway is None or not pending.underway.is_complete or pending.check is not None:
            return None
        self._pending.popleft()
        return self._result(pending, pending.underway, now)

    def _begin_check(self, pending: _Pending, names: Sequence[str]) -> list[SliceForNode]:
        assert pending.underway is not None
        if self._choose is None or len(names) < 2:
            return []
        part, owner = pending.underway.parts[self._choose(len(pending.underway.parts))]
        others = [name for name in names if name != owner]
        pending.checked, pending.check = part, CrossCheck(part.size)
        self._asked.clear()
        return [self._ask(others[self._choose(len(others))], part, pending)]

    def _ask(self, name: str, part: ValidationSlice, pending: _Pending) -> SliceForNode:
        """Have one who does not hold a slice compute it as well, under a number of its own."""
        number, self._next_slice = self._next_slice, self._next_slice + 1
        self._asked[name] = number
        return self._for(name, part._replace(number=number), pending)

    def _settle(self, pending: _Pending, check: CrossCheck, part: ValidationSlice) -> None:
        """Two agree: who said something else is named, and what they say is counted."""
        truth = check.truth
        assert pending.underway is not None
        assert truth is not None
        pending.check = None
        for name in check.liars():
            said = check.answers[name]
            pending.underway.correct(part.number, truth)
            self.liars.append(
                (name, f"it said {said.correct:g} of {part.size} are right, where two others have {truth.correct:g}")
            )

    def _for(self, name: str, part: ValidationSlice, pending: _Pending) -> SliceForNode:
        header = Validate(run=self._job.run, number=part.number, first=part.first, size=part.size)
        return SliceForNode(name, header, pending.end.weights.memory.data)

    def _result(self, pending: _Pending, done: ValidationPass, now: float) -> Validation:
        return Validation(
            step=pending.end.version,
            epoch=pending.end.epoch,
            loss=done.loss if isfinite(done.loss) else sys.float_info.max,
            accuracy=done.accuracy if self._job.has_accuracy else None,
            seconds=now - pending.begun,
        )
