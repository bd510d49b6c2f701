"""Which samples have been given out: a cursor in the order of every epoch, and what came back unused.

The order itself is a function of seed and epoch that every node computes alike; what travels are positions in it. So
each sample is used once an epoch, whoever comes or goes: a position is given out, and either counts as used or is given
back and goes to somebody else before new ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evener.errors import require
from evener.schema import Part

Range = tuple[int, int]
"""First position and number of positions."""


class SampleRange(Part, frozen=True, kw_only=True):
    """Some samples of one epoch: `ranges` of positions in its order."""

    epoch: int
    ranges: tuple[Range, ...]

    @property
    def num_samples(self) -> int:
        """In all ranges."""
        return sum([count for _, count in self.ranges])


class CursorState(Part, frozen=True, kw_only=True):
    """Where a cursor stands.

    Attributes:
        num_samples: in the data set.
        epoch: of the cursor.
        position: of the cursor, samples of its epoch that were given out.
        returned: (epoch, first, count) of what came back.
    """

    num_samples: int
    epoch: int
    position: int
    returned: tuple[tuple[int, int, int], ...] = ()


class SampleCursor:
    """The samples of one data set, epoch after epoch.

    Args:
        num_samples: in the data set.
        num_epochs: after which nothing is left; None: never.
    """

    def __init__(self, num_samples: int, num_epochs: int | None) -> None:
        require(num_samples > 0, "num_samples", num_samples, "positive")
        require(num_epochs is None or num_epochs > 0, "num_epochs", num_epochs, "positive, or None")
        self.num_samples, self._num_epochs = num_samples, num_epochs
        self._returned: list[tuple[int, int, int]] = []
        self._epoch, self._position = 0, 0

    @property
    def left(self) -> int:
        """Samples of the oldest epoch of which some are left; 0 when all epochs are given out."""
        if self._returned:
            epoch = self._returned[0][0]
            returned = sum([count for e, _, count in self._returned if e == epoch])
            return returned + (self._fresh() if epoch == self._epoch else 0)
        return self._fresh()

    def take(self, most: int) -> SampleRange | None:
        """At most `most` samples, all of the oldest epoch of which some are left; None if there are none."""
        ranges: list[Range] = []
        epoch = self._returned[0][0] if self._returned else self._epoch
        while most > 0 and self._returned and self._returned[0][0] == epoch:
            _, first, count = self._returned.pop(0)
            if count > most:
                self._returned.insert(0, (epoch, first + most, count - most))
                count = most
            ranges.append((first, count))
            most -= count
        count = min(most, self._fresh()) if epoch == self._epoch else 0
        if count > 0:
            ranges.append((self._position, count))
            self._position += count
            if self._position == self.num_samples:
                self._epoch, self._position = self._epoch + 1, 0
        return SampleRange(epoch=epoch, ranges=tuple(ranges)) if ranges else None

    def give_back(self, samples: SampleRange) -> None:
        """Have `samples` given out again, before anything new."""
        self._returned += [(samples.epoch, first, count) for first, count in samples.ranges]
        self._returned.sort()

    def state(self) -> CursorState:
        """Where it stands."""
        return CursorState(
            num_samples=self.num_samples, epoch=self._epoch, position=self._position, returned=tuple(self._returned)
        )

    @classmethod
    def resume(cls, state: CursorState, num_epochs: int | None) -> SampleCursor:
        """The cursor that stands where `state` says."""
        cursor = cls(state.num_samples, num_epochs)
        cursor._epoch, cursor._position, cursor._returned = state.epoch, state.position, list(state.returned)
        return cursor

    def _fresh(self) -> int:
        """Samples of the cursor's epoch that were never given out."""
        is_over = self._num_epochs is not None and self._epoch >= self._num_epochs
        return 0 if is_over else self.num_samples - self._position


def positions(samples: SampleRange) -> NDArray[np.int64]:
    """The positions of `samples` in the order of their epoch, in the order in which they are to be used."""
    return np.concatenate([np.arange(first, first + count) for first, count in samples.ranges])
