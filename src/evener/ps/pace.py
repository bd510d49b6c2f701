"""A node that is told to be slower than its machine: it idles in proportion to what it computed. No PyTorch.

The thread's own processor time counts, not the wall clock, so that several slowed nodes can honestly share a core:
what another process took is taken out of the idling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.errors import require

_SHORTEST_SLEEP = 0.0005
_LARGEST_CREDIT = 0.002


class Pace:
    """Slows the code inside of `with pace.computing():` down.

    Args:
        speed: 1 for the machine's own, 0.25 for a quarter of it.
        synchronise: waits for the work that a GPU has been given; on a GPU the wall clock counts.
    """

    def __init__(self, speed: float = 1.0, synchronise: Callable[[], None] | None = None) -> None:
        require(0 < speed <= 1, "--speed", speed, "above 0 and at most 1")
        self.speed = speed
        self._synchronise = synchronise
        self._debt = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the thread computes; before it ends, the thread idles as long as its speed demands."""
        if self.speed == 1:
            yield
            return
        wall, busy = time.perf_counter(), time.thread_time()
        yield
        if self._synchronise is not None:
            self._synchronise()
        wall = time.perf_counter() - wall
        busy = wall if self._synchronise is not None else time.thread_time() - busy
        self._idle(busy / self.speed - wall)

    def _idle(self, seconds: float) -> None:
        self._debt = max(self._debt + seconds, -_LARGEST_CREDIT)
        if self._debt >= _SHORTEST_SLEEP:
            before = time.perf_counter()
            time.sleep(self._debt)
            self._debt -= time.perf_counter() - before
