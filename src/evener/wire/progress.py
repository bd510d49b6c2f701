"""How long something that ought to move has not moved: the one rule by which slow and stopped peers are told apart."""

from __future__ import annotations


class Progress:
    """Watches a counter that grows while a peer is alive.

    Args:
        now: seconds on the watcher's clock.
    """

    __slots__ = ("_count", "_since")

    def __init__(self, now: float) -> None:
        self._count, self._since = 0, now

    def idle_seconds(self, count: int, *, expected: bool, now: float) -> float:
        """Seconds since `count` last changed or nothing was `expected`, as far as calls of this have seen."""
        if count != self._count or not expected:
            self._count, self._since = count, now
        return now - self._since
