"""A slice of the validation data that two nodes compute: if they disagree a third one decides, and who lied is named.

Nobody can tell which of its slices another one computes as well. Devices differ in the last digits, and a sample at the
edge may fall to either side, so answers agree if they are near each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

TOLERANCE = 0.05
"""Of a loss; half precision stays within it."""
SAMPLES_APART = 2
PART_APART = 0.02
"""Right answers that two devices may differ in: so many samples, or this part of them."""


class SliceAnswer(NamedTuple):
    """What somebody made of a slice.

    Attributes:
        loss: sum over its samples; None if it is not finite.
        correct: how many were right.
    """

    loss: float | None
    correct: float

    def agrees_with(self, other: SliceAnswer, size: int) -> bool:
        """Whether both may be true of the same weights and samples."""
        if abs(self.correct - other.correct) > max(SAMPLES_APART, PART_APART * size):
            return False
        if self.loss is None or other.loss is None:
            return self.loss == other.loss
        return isclose(self.loss, other.loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE * size)


class CrossCheck:
    """One slice, and what those say of it who were asked.

    Args:
        size: samples of the slice.

    Attributes:
        answers: by name.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.answers: dict[str, SliceAnswer] = {}

    @property
    def is_settled(self) -> bool:
        """Whether two agree."""
        return self.truth is not None

    @property
    def truth(self) -> SliceAnswer | None:
        """What two agree upon; None as long as no two do."""
        given = list(self.answers.values())
        for number, one in enumerate(given):
            if any(one.agrees_with(other, self._size) for other in given[number + 1 :]):
                return one
        return None

    def liars(self) -> list[str]:
        """Who said something else than what two others agree upon; of two that disagree, nobody knows."""
        truth = self.truth
        if truth is None:
            return []
        return [name for name, one in self.answers.items() if not one.agrees_with(truth, self._size)]

    def next_of(self, names: Sequence[str]) -> str | None:
        """Who of `names` can be asked, being another one than those who answered; None if nobody can."""
        return next((name for name in names if name not in self.answers), None)
