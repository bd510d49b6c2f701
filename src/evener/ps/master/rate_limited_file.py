"""Rate-limited writing of a file that many messages change: it takes little time of the only thread of the master."""

from __future__ import annotations

import time
from collections.abc import Callable

_FRACTION, _RETRY_SECONDS = 0.05, 10.0
"""Largest fraction of the time that writing takes, and the pause after a failure."""


class RateLimitedFile:
    """A file that is written when its contents have changed: at once, or soon if that would take too much time.

    Args:
        write: writes the contents as they are now.
        clock: seconds.
    """

    def __init__(self, write: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._has_changed, self._due = False, 0.0

    def changed(self) -> None:
        """Note that the contents have changed. Raises OSError: they cannot be written now; it is tried again."""
        self._has_changed = True
        self.tick()

    def save(self) -> None:
        """Write the changed contents now. Raises OSError: they cannot be written now; it is tried again."""
        self._has_changed = True
        self.flush()

    def tick(self) -> None:
        """Write if that is due. Raises OSError."""
        if self._has_changed and self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write now if the contents have changed. Raises OSError."""
        if not self._has_changed:
            return
        begin = self._clock()
        try:
            self._write()
        except OSError:
            self._due = self._clock() + _RETRY_SECONDS
            raise
        self._has_changed, now = False, self._clock()
        self._due = now + (now - begin) / _FRACTION
