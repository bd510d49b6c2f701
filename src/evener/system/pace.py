"""Throttling of a node: it idles in proportion to its computing time. Needs no PyTorch.

A node of speed 0.25 idles three times as long as it computed. The thread's own CPU time counts, not the wall clock, so
that several throttled nodes can share a core fairly: time lost to another process is subtracted from the idle time. So
is the cost of sharing itself, cold caches and switches, if there is a `reference`: the seconds of a step at full speed
on a core of its own. Every step of a throttled node then takes reference / speed, plus loading. The node idles before
it sends its gradients, where the others wait for it, and the next steps make up for a step that took longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.records.errors import require
from evener.records.schema import Finite, Part

_MIN_SLEEP_S = 0.0005
_MAX_CREDIT_S = 0.002
_MAX_DELAY_S = 0.5
"""Limit of the delay of earlier steps that later ones make up for."""


class StepSeconds(Part, frozen=True, kw_only=True):
    """Seconds of a step at full speed, undisturbed, as a function of its samples.

    Attributes:
        fixed: seconds that do not depend on the samples.
        each: further seconds per sample.
    """

    fixed: Finite
    each: Finite

    def __call__(self, samples: int) -> float:
        """Return the seconds of a step."""
        return self.fixed + samples * self.each


class Pace:
    """Throttles a thread.

    Args:
        speed: 1 for the machine's own, 0.25 for a quarter of it.
        synchronise: waits for the queued work of a GPU; on a GPU the wall clock counts.

    Attributes:
        reference: seconds of a step of so many samples at full speed; None to use each step's own computing time.
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
        """Measure the computing time of the block, then idle as long as the speed requires."""
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
        """Idle for a computation; return the seconds of idling.

        Args:
            busy: CPU seconds of the computation.
            wall: seconds of the computation.
            is_loading: whether it was loading samples, which is not part of the reference.
            is_update: whether it was the optimizer's update.
            before_update: whether only the update of the step remains, and the others wait for the gradients.
        """
        self._debt = max(self._debt + busy / self.speed - wall, -_MAX_CREDIT_S)
        self._spent += 0.0 if is_loading else wall
        if is_update:
            self._update = busy / self.speed
        if self._is_held() and not is_loading:
            self._hold(is_update, before_update)
        if self._debt < _MIN_SLEEP_S:
            return 0.0
        before = time.perf_counter()
        time.sleep(self._debt)
        slept = time.perf_counter() - before
        self._debt -= slept
        self._spent += 0.0 if is_loading else slept
        return slept

    def expect(self, samples: int) -> None:
        """Add samples to the present step."""
        self._samples += samples

    def end_step(self) -> None:
        """End the step; the next ones make up for it if it took longer than its reference."""
        if self._is_held():
            self._delay = min(max(self._spent - self._budget(), 0.0), _MAX_DELAY_S)
        self.discard()

    def discard(self) -> None:
        """Discard computations since the last step, which belong to no step."""
        self._samples, self._spent = 0, 0.0

    def _is_held(self) -> bool:
        return self.reference is not None and self.speed < 1.0 and self._samples > 0

    def _budget(self) -> float:
        """Return the seconds for this step, less the delay of earlier steps."""
        assert self.reference is not None
        return self.reference(self._samples) / self.speed - self._delay

    def _hold(self, is_update: bool, before_update: bool) -> None:
        """Idle for the rest of the step's budget, but never longer."""
        remaining = self._budget() - self._spent
        if is_update:
            self._debt = remaining
        elif before_update:
            self._debt = remaining - self._update
        else:
            self._debt = min(self._debt, remaining - self._update)
