"""Tells a rank's computing from its waiting, and slows computing down to a chosen speed.

A rank computes between `resume` and `pause` and waits for others between `pause` and `resume`:

    pace.resume("fb")           # forward and backward ...
    pace.pause()                # ... up to a collective: a slowed rank idles here, in proportion to what it computed
    work.wait()                 # waiting for others is not computing
    pace.resume("wu")
    pace.pause()
    pace.close_step(samples)

A local node of speed 0.25 idles three times as long as it computed. Its own processor time counts, not the wall clock,
so that several slowed nodes honestly share a core: time lost to another process is taken out of the idling. So is what
the sharing itself costs, cold caches and switches, once the pace has a `reference`: the seconds of a step at full speed
on a core of one's own. Every step of a slowed node then takes reference / speed: it is held to that before its
gradients leave it, where the others wait for it, and what a step takes longer is made up for by the next ones.
On a GPU the segments are timed by events in the stream and read when they are complete, without synchronising.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Phase = Literal["io", "fb", "wu"]

_SHORTEST_SLEEP = 0.0005
_LARGEST_CREDIT = 0.002
_LARGEST_DELAY = 0.5
"""Seconds by which steps may have fallen behind their reference: what is more is not made up for."""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds that one rank computed in one step, by phase (loading, forward and backward, update).

    Attributes:
        samples: computed in the step.
        io: seconds of loading and moving the batch.
        fb: seconds of forward and backward.
        wu: seconds of the optimiser's update.
    """

    samples: int
    io: float = 0.0
    fb: float = 0.0
    wu: float = 0.0

    @property
    def seconds(self) -> float:
        """All phases together."""
        return self.io + self.fb + self.wu


class _Mark(NamedTuple):
    """A moment: by the wall clock, by this thread's processor time and, on a GPU, in the stream."""

    wall: float
    busy: float
    event: torch.cuda.Event | None


class Pace:
    """The clock of one rank, which also idles when the rank is to be slower than its device.

    Args:
        device: that computes.
        speed: 1.0 for the device's own speed, 0.25 for a quarter of it.

    Attributes:
        reference: seconds of a step of so many samples at full speed; None to go by what each step itself computed.
    """

    def __init__(self, device: torch.device, speed: float = 1.0) -> None:
        self.speed = speed
        self.reference: Callable[[int], float] | None = None
        self._samples = 0
        self._spent = 0.0
        self._update = 0.0
        self._delay = 0.0
        self._device = device
        self._open: tuple[Phase, _Mark] | None = None
        self._segments: list[tuple[Phase, _Mark, _Mark]] = []
        self._steps: deque[tuple[int, list[tuple[Phase, _Mark, _Mark]]]] = deque()
        self._debt = 0.0

    def resume(self, phase: Phase) -> None:
        """Computing begins (again), in `phase`."""
        self._open = (phase, self._mark(phase))

    def pause(self, *, before_update: bool = False) -> None:
        """Computing ends; a slowed rank idles before this returns.

        Args:
            before_update: all of the step is computed but its update, and the others wait for it from now on.
        """
        if self._open is None:
            return
        (phase, begin), self._open = self._open, None
        end = self._mark(phase)
        if self.speed < 1.0:
            end = self._idle(phase, begin, end, before_update)
        self._segments.append((phase, begin, end))

    def expect(self, samples: int) -> None:
        """So many samples more are computed in this step."""
        self._samples += samples

    def break_for_others(self) -> None:
        """Pause and resume in the same phase: a slowed rank pays its idling before it hands anything to the others."""
        if self._open is not None and self.speed < 1.0:
            phase = self._open[0]
            self.pause()
            self.resume(phase)

    @property
    def phase(self) -> Phase | None:
        """The phase in which the rank computes now; None while it waits."""
        return self._open[0] if self._open else None

    def close_step(self, samples: int) -> list[StepTiming]:
        """End the step of `samples` samples; returns the timings, oldest first, that are complete by now."""
        self.pause()
        self._close_budget()
        self._steps.append((samples, self._segments))
        self._segments = []
        done = []
        while self._steps and all(_is_complete(segment) for segment in self._steps[0][1]):
            count, segments = self._steps.popleft()
            done.append(_sum(count, segments))
        return done

    def discard(self) -> None:
        """Forget what was timed since the last step: work that is not part of any."""
        self.pause()
        self._segments = []
        self._samples, self._spent = 0, 0.0

    def _close_budget(self) -> None:
        """A step later than its reference is made up for by the next ones."""
        if self._is_held():
            self._delay = min(max(self._spent - self._budget(), 0.0), _LARGEST_DELAY)
        self._samples, self._spent = 0, 0.0

    def _is_held(self) -> bool:
        return self.reference is not None and self.speed < 1.0 and self._samples > 0

    def _budget(self) -> float:
        """Seconds that this step is to take, less what the steps before it took too long."""
        assert self.reference is not None
        return self.reference(self._samples) / self.speed - self._delay

    def _mark(self, phase: Phase) -> _Mark:
        event: torch.cuda.Event | None = None
        if self._device.type == "cuda" and phase != "io":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return _Mark(time.perf_counter(), time.thread_time(), event)

    def _idle(self, phase: Phase, begin: _Mark, end: _Mark, before_update: bool) -> _Mark:
        if end.event is not None and begin.event is not None:
            end.event.synchronize()
            busy = wall = begin.event.elapsed_time(end.event) / 1e3
        else:
            busy, wall = end.busy - begin.busy, end.wall - begin.wall
        self._debt = max(self._debt + busy / self.speed - wall, -_LARGEST_CREDIT)
        self._spent += wall
        if phase == "wu":
            self._update = busy / self.speed
        if self._is_held():
            self._hold(phase, before_update)
        if self._debt < _SHORTEST_SLEEP:
            return end
        before = time.perf_counter()
        time.sleep(self._debt)
        slept = time.perf_counter() - before
        self._debt -= slept
        self._spent += slept
        return self._mark(phase)

    def _hold(self, phase: Phase, before_update: bool) -> None:
        """Idle until the step has taken what its reference allows, and never longer."""
        left = self._budget() - self._spent
        if phase == "wu":
            self._debt = left
        elif before_update:
            self._debt = left - self._update
        else:
            self._debt = min(self._debt, left - self._update)


def _is_complete(segment: tuple[Phase, _Mark, _Mark]) -> bool:
    event = segment[2].event
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


def _sum(samples: int, segments: list[tuple[Phase, _Mark, _Mark]]) -> StepTiming:
    seconds: dict[Phase, float] = {"io": 0.0, "fb": 0.0, "wu": 0.0}
    for phase, begin, end in segments:
        if begin.event is not None and end.event is not None:
            seconds[phase] += begin.event.elapsed_time(end.event) / 1e3
        else:
            seconds[phase] += end.wall - begin.wall
    return StepTiming(samples=samples, **seconds)
