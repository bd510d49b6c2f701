"""Who keeps the others waiting and does not get on: pure.

Work may take much longer than the patience: an epoch of local steps, a gradient of a large batch, weights over a thin
line. So what counts is the time since a node last gave a sign of getting on: bytes that went to it or came from it, a
step done, a piece of work taken or finished. A step itself is without signs: it may take what it is believed to take,
and the patience on top.
"""

from __future__ import annotations

from collections.abc import Mapping


class Diligence:
    """The signs that everybody gave.

    Args:
        patience: seconds that everybody waits for one.
        now: seconds, of a clock that does not go back.

    Attributes:
        latest: when anybody gave a sign.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._signs: dict[str, float] = {}
        self.latest = now

    def sign(self, name: str, now: float) -> None:
        """Node `name` gets on."""
        self._signs[name] = self.latest = now

    def forget(self, name: str) -> None:
        """Node `name` is gone."""
        self._signs.pop(name, None)

    def late(self, step_seconds: Mapping[str, float], now: float) -> list[str]:
        """Those who should have given a sign the patience ago.

        Args:
            step_seconds: that one step is believed to take, of each who is at work and has given a sign.
            now: seconds.
        """
        return [name for name, seconds in step_seconds.items() if now - self._signs[name] > self._patience + seconds]
