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
    """Where a supply stands.

    Attributes:
        epoch: of the cursor.
        position: of the cursor, samples of its epoch that were given out.
        returned: (epoch, first, count) of what came back.
    """

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
        if not self._returned:
            return self._fresh()
        epoch = self._oldest_epoch()
        returned = sum(count for e, _, count in self._returned if e == epoch)
        return returned + (self._fresh() if epoch == self._epoch else 0)

    def take(self, most: int) -> SampleRange | None:
        """At most `most` samples, all of the oldest epoch of which some are left; None if there are none."""
        epoch, ranges, wanted = self._oldest_epoch(), list[Range](), min(most, self.left)
        while wanted > 0:
            first, count = self._next_range(epoch, wanted)
            ranges.append((first, count))
            wanted -= count
        return SampleRange(epoch=epoch, ranges=tuple(ranges)) if ranges else None

    def give_back(self, portion: SampleRange) -> None:
        """Have `portion` given out again, before anything new."""
        self._returned += [(portion.epoch, first, count) for first, count in portion.ranges]
        self._returned.sort()

    def mark(self) -> CursorState:
        """Where it stands."""
        return CursorState(epoch=self._epoch, position=self._position, returned=tuple(self._returned))

    def resume(self, mark: CursorState) -> None:
        """Go on from `mark`."""
        self._epoch, self._position, self._returned = mark.epoch, mark.position, list(mark.returned)

    def _oldest_epoch(self) -> int:
        return self._returned[0][0] if self._returned else self._epoch

    def _fresh(self) -> int:
        """Samples of the cursor's epoch that were never given out."""
        is_over = self._num_epochs is not None and self._epoch >= self._num_epochs
        return 0 if is_over else self.num_samples - self._position

    def _next_range(self, epoch: int, most: int) -> Range:
        if self._returned and self._returned[0][0] == epoch:
            _, first, count = self._returned.pop(0)
            if count > most:
                self._returned.insert(0, (epoch, first + most, count - most))
            return first, min(count, most)
        first, count = self._position, min(most, self._fresh())
        self._position += count
        if self._position == self.num_samples:
            self._epoch, self._position = self._epoch + 1, 0
        return first, count


def positions(portion: SampleRange) -> NDArray[np.int64]:
    """The positions of `portion` in the order of its epoch, in the order in which they are to be used."""
    return np.concatenate([np.arange(first, first + count) for first, count in portion.ranges])
