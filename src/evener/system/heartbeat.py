"""Heartbeats: when the next one is due, and how long a peer has been silent. Time is an argument.

Ranks of a run send heartbeats through their shared store, nodes and master over their connections, whose bytes count,
too. All send several heartbeats within the patience, and follow one rule: a counter that should grow, but has not grown
for the patience by the listener's own clock, means that the peer is lost. This needs no common clock, and tells slow
peers from dead ones.
"""

from __future__ import annotations

_MIN_BEATS = 8
"""Smallest number of heartbeats within the patience."""
_MAX_INTERVAL_S = 0.5
"""Longest time between two heartbeats."""
_MAX_LOOK = 0.25
"""Largest share of the patience that the time between two looks counts."""


def interval(patience: float) -> float:
    """Return the seconds between two heartbeats, for peers with this patience."""
    return min(_MAX_INTERVAL_S, patience / _MIN_BEATS)


def is_due(last: float, now: float, patience: float) -> bool:
    """Return whether the heartbeat after the one at `last` is due at `now`."""
    return now - last >= interval(patience)


class Progress:
    """Follows a counter that grows while a peer is alive.

    Args:
        now: seconds on the watcher's clock.
    """

    __slots__ = ("_count", "_since")

    def __init__(self, now: float) -> None:
        self._count, self._since = 0, now

    def idle_seconds(self, count: int, *, expected: bool = True, now: float) -> float:
        """Return the seconds since `count` last changed or nothing was `expected`, as far as calls have seen."""
        if count != self._count or not expected:
            self._count, self._since = count, now
        return now - self._since


class ListenedSeconds:
    """A clock that stops while its owner is stopped, so that this time does not count as silence of peers.

    If a machine or a process group was stopped, listener and peers were stopped alike.

    Args:
        patience: seconds of silence after which a peer is lost.
        now: seconds on the listener's clock.

    Attributes:
        seconds: result of the last call of `at`; 0 before the first.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._longest, self._looked, self.seconds = _MAX_LOOK * patience, now, 0.0

    def at(self, now: float) -> float:
        """Return the seconds in which the owner listened, up to `now`; call it several times within the patience."""
        self.seconds += min(now - self._looked, self._longest)
        self._looked = now
        return self.seconds

    def away(self, now: float) -> float:
        """Return the seconds since the last call of `at` in which the owner did not listen: it was stopped, or busy."""
        return max(0.0, now - self._looked - self._longest)
