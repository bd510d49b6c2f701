"""Waiting for others in slices, so that another thread can end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from evener.records.errors import NodeLost

_SLICE = 0.5


def never() -> bool:
    """Whether a wait that nobody ends is over."""
    return False


def slices(deadline: float, is_over: Callable[[], bool]) -> Iterator[float]:
    """Seconds to wait for, again and again until the `deadline` of the monotonic clock.

    Raises:
        NodeLost: `is_over` says that nobody waits any more.
    """
    while (left := deadline - time.monotonic()) > 0:
        if is_over():
            raise NodeLost("those who were waited for are not awaited any more")
        yield min(_SLICE, left)
