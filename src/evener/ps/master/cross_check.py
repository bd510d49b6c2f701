"""Cross-check of validation: two nodes compute the same slice; if they disagree, a third one decides which is faulty.

A node cannot tell which of its slices is checked. Devices differ in the last digits, and a sample near a decision
boundary may fall on either side, so near answers agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

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
