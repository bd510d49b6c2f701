"""Heartbeats: who is due to give a sign of life, and who has been silent for too long. Pure: time is an argument.

Ranks of a run beat through the store that they share, nodes and master over their connections, whose bytes count too.
All say that they live several times within the patience, and all go by one rule: what ought to grow, and has not grown
for the patience by the listener's own clock, is lost. That needs no common clock, and does not mistake slow for dead.
"""

from __future__ import annotations

_BEATS = 8
"""Within the patience, at least."""
_LONGEST_INTERVAL = 0.5
"""Seconds between two heartbeats, at most."""
_LONGEST_LOOK = 0.25
"""Of the patience, that the time between two looks counts at most."""


def interval(patience: float) -> float:
    """Seconds between two heartbeats, for peers that bear `patience` seconds of silence."""
    return min(_LONGEST_INTERVAL, patience / _BEATS)


def is_due(last: float, now: float, patience: float) -> bool:
    """Whether it is time, at `now`, for the heartbeat after the one at `last`."""
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
        """Seconds since `count` last changed or nothing was `expected`, as far as calls of this have seen."""
        if count != self._count or not expected:
            self._count, self._since = count, now
        return now - self._since


class ListenedSeconds:
    """A clock that stands still while its owner does: what a listener slept through is nobody's silence.

    A machine, or a process group, that was stopped and goes on, stopped listener and peers alike.

    Args:
        patience: seconds of silence that are borne.
        now: seconds on the listener's clock.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._longest, self._looked, self._seconds = _LONGEST_LOOK * patience, now, 0.0

    def at(self, now: float) -> float:
        """Seconds in which the owner listened, up to `now`; to be asked several times within the patience."""
        self._seconds += min(now - self._looked, self._longest)
        self._looked = now
        return self._seconds
