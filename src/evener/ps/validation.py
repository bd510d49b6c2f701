"""Validation, leased in slices to whoever is there: pure bookkeeping of who computes what, and the sums so far.

The validation data are cut among the members in proportion to their speeds; a slice whose member is lost, or late, is
given to another one. A slice counts once, whoever answers for it first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from evener.oracle.apportion import Worker, apportion


class Slice(NamedTuple):
    """Samples [first, first + size) of the validation data, as the slice `number` of the run."""

    number: int
    first: int
    size: int


class Assessment:
    """One pass over the validation data.

    Args:
        num_samples: of the validation data.
        costs: seconds a sample of everybody who may compute, by name.
        first_number: of the slices.
    """

    def __init__(self, num_samples: int, costs: Mapping[str, float], first_number: int) -> None:
        self._num_samples = num_samples
        self._open: dict[int, tuple[Slice, str]] = {}
        self._loss = self._correct = 0.0
        sizes = apportion(num_samples, [Worker(unit_seconds=cost) for cost in costs.values()])
        first = 0
        for name, size in zip(costs, sizes, strict=True):
            if size:
                number = first_number + len(self._open)
                self._open[number] = Slice(number, first, size), name
                first += size
        self.next_number = first_number + len(self._open)

    @property
    def is_complete(self) -> bool:
        """Whether every sample has been answered for."""
        return not self._open

    @property
    def loss(self) -> float:
        """Mean over the samples; of a complete assessment."""
        return self._loss / self._num_samples

    @property
    def accuracy(self) -> float:
        """In [0, 1]; of a complete assessment."""
        return self._correct / self._num_samples

    def slices_of(self, name: str) -> list[Slice]:
        """What `name` still has to answer for."""
        return [part for part, owner in self._open.values() if owner == name]

    @property
    def owners(self) -> list[str]:
        """Everybody who still has to answer, each once, in order of the slices."""
        return list(dict.fromkeys(owner for _, owner in self._open.values()))

    def answer(self, number: int, loss: float, correct: float) -> bool:
        """Count a slice; whether it was awaited: another may have answered for it before."""
        if self._open.pop(number, None) is None:
            return False
        self._loss += loss if isfinite(loss) else float("nan")
        self._correct += correct
        return True

    def lease_again(self, owners: Collection[str], to: Sequence[str]) -> list[tuple[Slice, str]]:
        """Give what `owners` have not answered for to others, in turn: who gets which slice now."""
        moved = []
        for turn, (part, owner) in enumerate([entry for entry in self._open.values() if entry[1] in owners]):
            others = [name for name in to if name != owner]
            if others:
                self._open[part.number] = moved_to = part, others[turn % len(others)]
                moved.append(moved_to)
        return moved
