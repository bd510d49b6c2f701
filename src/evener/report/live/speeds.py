"""How fast each node is, beside how fast it was: a node that slows down is found by its own past, not by the others."""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import median

_KEPT = 400
"""Entries, which are a moment each."""
_LEAST = 4
"""Entries before a node's usual speed is known; the first one is left out of it, which fills caches."""
_WINDOW = 0.75
"""Busy seconds that are `now`; at least two entries."""
_SLOW = 0.67
"""Of its usual speed: below this, a node is told to be slow."""


class NodeSpeed:
    """Work by seconds of one node, whatever it waits."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, work: float, seconds: float) -> None:
        """An entry more: so much work took it so many seconds; nothing if it did none."""
        if work > 0 and seconds > 0:
            self._entries.append((work, seconds))

    @property
    def now(self) -> float:
        """In the last moments; 0 before it has worked."""
        work = seconds = 0.0
        for count, (more, busy) in enumerate(reversed(self._entries)):
            if count >= 2 and seconds >= _WINDOW:
                break
            work, seconds = work + more, seconds + busy
        return work / seconds if seconds else 0.0

    @property
    def usual(self) -> float:
        """The median of all entries but the last moments; 0 before there are enough."""
        older = len(self._entries) - 2
        if older <= _LEAST:
            return 0.0
        return median(work / seconds for work, seconds in islice(self._entries, 1, older))

    @property
    def slowdown(self) -> float:
        """How many times slower than usual it is, if much, lately and in each of the last two entries; else 1."""
        usual = self.usual
        if usual == 0:
            return 1.0
        last = [work / seconds for work, seconds in islice(reversed(self._entries), 2)]
        is_slow = max(self.now, *last) < _SLOW * usual
        return usual / self.now if is_slow else 1.0
