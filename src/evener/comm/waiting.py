"""Waits in short slices, which another thread can end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from evener.records.errors import NodeLost

_SLICE = 0.5


def never() -> bool:
    """Return False, as `is_over` of a wait without an end."""
    return False


def slices(deadline: float, is_over: Callable[[], bool]) -> Iterator[float]:
    """Yield seconds to wait for, until the `deadline` of the monotonic clock.

    Raises:
        NodeLost: `is_over` ends the wait.
    """
    while (remaining := deadline - time.monotonic()) > 0:
        if is_over():
            raise NodeLost("the wait for other ranks was ended")
        yield min(_SLICE, remaining)
