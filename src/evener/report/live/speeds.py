"""Speed of each node, now and usually: a node is slow compared with its own past, not with other nodes."""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import median

_MAX_ENTRIES = 400
"""Number of entries that are kept."""
_MIN_ENTRIES = 4
"""Entries before a node's usual speed is known; the first is ignored, since it fills caches."""
_PRESENT_S = 0.75
"""Busy seconds that count as `now`; at least two entries."""
_SLOW_FRACTION = 0.67
"""Fraction of its usual speed below which a node counts as slow."""


class NodeSpeed:
    """Work and busy seconds of one node; waiting does not count."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float]] = deque(maxlen=_MAX_ENTRIES)

    def add(self, work: float, seconds: float) -> None:
        """Add an entry of `work` done in `seconds`; an entry without work is ignored."""
        if work > 0 and seconds > 0:
            self._entries.append((work, seconds))

    @property
    def now(self) -> float:
        """The speed in the last moments; 0 before the node has worked."""
        work = seconds = 0.0
        for count, (more, busy) in enumerate(reversed(self._entries)):
            if count >= 2 and seconds >= _PRESENT_S:
                break
            work, seconds = work + more, seconds + busy
        return work / seconds if seconds else 0.0

    @property
    def usual(self) -> float:
        """The median speed of all entries before the last two; 0 before there are enough."""
        older = len(self._entries) - 2
        if older <= _MIN_ENTRIES:
            return 0.0
        return median(work / seconds for work, seconds in islice(self._entries, 1, older))

    @property
    def slowdown(self) -> float:
        """How many times slower than usual the node is; 1 unless all recent entries are much slower."""
        usual = self.usual
        if usual == 0:
            return 1.0
        last = [work / seconds for work, seconds in islice(reversed(self._entries), 2)]
        is_slow = max(self.now, *last) < _SLOW_FRACTION * usual
        return usual / self.now if is_slow else 1.0
