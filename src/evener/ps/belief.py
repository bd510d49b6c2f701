"""What the master believes of each node's speed: pure. One bad measurement must not make a node slow for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median

from msgspec.structs import replace

from evener.sync.messages import Push

MOST_SLOWING = 4.0
"""By which one measurement may exceed what is known of a node's seconds a sample: it may have been stopped once."""
DISAPPOINTMENT = 2.0
"""By which a node is taken to be slower that was late; so the time for one that is much slower is found soon."""
NEWEST = 0.25
"""Weight of the newest measurement of these, as at the server."""


class Beliefs:
    """Seconds a sample of every node that ever had a part in a run.

    Args:
        known: by name, to begin with.
    """

    def __init__(self, known: Mapping[str, float] = {}) -> None:
        self._seconds = dict(known)

    def of(self, names: Iterable[str]) -> dict[str, float]:
        """Of each of `names`, who have all been expected before."""
        return {name: self._seconds[name] for name in names}

    def benchmarked(self, name: str, seconds: float) -> None:
        """The node has measured itself; what makes no sense is not believed."""
        if isfinite(seconds) and seconds > 0:
            self._seconds[name] = seconds

    def expect(self, name: str) -> float:
        """What the node takes; a middling one's if nothing is known of it."""
        known = self._seconds.values()
        return self._seconds.setdefault(name, median(known) if known else 1.0)

    def disappointed(self, name: str) -> None:
        """The node has not done a step in the time in which it was believed to do it: it is slower than that."""
        self._seconds[name] *= DISAPPOINTMENT

    def observe(self, name: str, push: Push, num_samples: int) -> Push:
        """Learn from a contribution; it is returned with seconds that can be believed."""
        before = self._seconds[name]
        seconds = min(push.seconds / num_samples, MOST_SLOWING * before)
        self._seconds[name] = before + NEWEST * (seconds - before)
        is_usual = seconds < MOST_SLOWING * before
        return push if is_usual else replace(push, seconds=seconds * num_samples)
