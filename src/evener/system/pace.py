"""A node that is told to be slower than its machine: it idles in proportion to what it computed. No PyTorch.

A node of speed 0.25 idles three times as long as it computed. The thread's own processor time counts, not the wall
clock, so that several slowed nodes honestly share a core: time lost to another process is taken out of the idling, and
what the sharing itself costs, cold caches and switches, once the pace has a `reference`: the seconds of a step at full
speed on a core of one's own. Every step of a slowed node then takes reference / speed, besides loading: it is held to
that before its gradients leave it, where the others wait for it, and what a step takes longer is made up for by the
next ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.records.errors import require
from evener.records.schema import Finite, Part

_SHORTEST_SLEEP = 0.0005
_LARGEST_CREDIT = 0.002
_LARGEST_DELAY = 0.5
"""Seconds by which steps may have fallen behind their reference: what is more is not made up for."""


class StepSeconds(Part, frozen=True, kw_only=True):
    """What a step of so many samples takes a node at full speed, undisturbed.

    Attributes:
        fixed: seconds, however many they are.
        each: seconds of a sample, besides.
    """

    fixed: Finite
    each: Finite

    def __call__(self, samples: int) -> float:
        """Seconds."""
        return self.fixed + samples * self.each


class Pace:
    """Slows a thread down.

    Args:
        speed: 1 for the machine's own, 0.25 for a quarter of it.
        synchronise: waits for the work that a GPU has been given; on a GPU the wall clock counts.

    Attributes:
        reference: seconds of a step of so many samples at full speed; None to go by what each step itself computed.
    """

    def __init__(self, speed: float = 1.0, synchronise: Callable[[], None] | None = None) -> None:
        require(0 < speed <= 1, "--speed", speed, "above 0 and at most 1")
        self.speed = speed
        self.reference: Callable[[int], float] | None = None
        self._synchronise = synchronise
        self._debt = 0.0
        self._samples, self._spent = 0, 0.0
        self._update = 0.0
        self._delay = 0.0

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
        self.idle(wall if self._synchronise is not None else time.thread_time() - busy, wall)

    def idle(
        self,
        busy: float,
        wall: float,
        *,
        is_loading: bool = False,
        is_update: bool = False,
        before_update: bool = False,
    ) -> float:
        """Idle for what was computed; the seconds of it.

        Args:
            busy: seconds of processor time that it took.
            wall: seconds that it took.
            is_loading: it was samples that were read: not part of the reference.
            is_update: it was the optimiser's update.
            before_update: all of the step is computed but its update, and the others wait for it from now on.
        """
        self._debt = max(self._debt + busy / self.speed - wall, -_LARGEST_CREDIT)
        self._spent += 0.0 if is_loading else wall
        if is_update:
            self._update = busy / self.speed
        if self._is_held() and not is_loading:
            self._hold(is_update, before_update)
        if self._debt < _SHORTEST_SLEEP:
            return 0.0
        before = time.perf_counter()
        time.sleep(self._debt)
        slept = time.perf_counter() - before
        self._debt -= slept
        self._spent += 0.0 if is_loading else slept
        return slept

    def expect(self, samples: int) -> None:
        """So many samples more are computed in this step."""
        self._samples += samples

    def end_step(self) -> None:
        """The step is over; if it took longer than its reference, the next ones make up for it."""
        if self._is_held():
            self._delay = min(max(self._spent - self._budget(), 0.0), _LARGEST_DELAY)
        self.discard()

    def discard(self) -> None:
        """Forget what was computed since the last step: it is not part of any."""
        self._samples, self._spent = 0, 0.0

    def _is_held(self) -> bool:
        return self.reference is not None and self.speed < 1.0 and self._samples > 0

    def _budget(self) -> float:
        """Seconds that this step is to take, less what the steps before it took too long."""
        assert self.reference is not None
        return self.reference(self._samples) / self.speed - self._delay

    def _hold(self, is_update: bool, before_update: bool) -> None:
        """Idle until the step has taken what its reference allows, and never longer."""
        left = self._budget() - self._spent
        if is_update:
            self._debt = left
        elif before_update:
            self._debt = left - self._update
        else:
            self._debt = min(self._debt, left - self._update)
