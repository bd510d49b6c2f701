"""Measurement of a rank's computing, phase by phase, apart from its waiting; slowed ranks idle at every pause.

A rank computes between `resume` and `pause` and waits for others between `pause` and `resume`:

    timer.resume("fb")          # forward and backward ...
    timer.pause()               # ... up to a collective: a slowed rank idles here, in proportion to what it computed
    work.wait()                 # waiting for others is not computing
    timer.resume("wu")
    timer.pause()
    timer.close_step(samples)

On a GPU the segments are timed by events in the stream and read when they are complete, without synchronising.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from evener.system import accelerators
from evener.system.pace import Pace

Phase = Literal["io", "fb", "wu"]


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds that one rank computed in one step, by phase (loading, forward and backward, update).

    Attributes:
        samples: computed in the step.
        io: seconds of loading and moving the batch.
        fb: seconds of forward and backward.
        wu: seconds of the optimizer's update.
    """

    samples: int
    io: float = 0.0
    fb: float = 0.0
    wu: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of all phases."""
        return self.io + self.fb + self.wu


class _Instant(NamedTuple):
    """A moment: by the wall clock, by this thread's CPU time and, on an accelerator, in its queue."""

    wall: float
    busy: float
    event: torch.Event | None


_Segment = tuple[Phase, _Instant, _Instant]


class StepTimer:
    """A clock of one rank's steps.

    Args:
        device: that computes.
        speed: 1.0 for the device's own speed, 0.25 for a quarter of it.

    Attributes:
        pace: throttle of a rank that is slower than its device.
    """

    def __init__(self, device: torch.device, speed: float = 1.0) -> None:
        self.pace = Pace(speed)
        self._device = device
        self._open: tuple[Phase, _Instant] | None = None
        self._segments: list[_Segment] = []
        self._steps: deque[tuple[int, list[_Segment]]] = deque()

    @property
    def phase(self) -> Phase | None:
        """The current phase of computing; None while the rank waits."""
        return self._open[0] if self._open else None

    def resume(self, phase: Phase) -> None:
        """Begin or continue to compute, in `phase`."""
        self._open = (phase, self._now(phase))

    def pause(self, *, before_update: bool = False) -> None:
        """Stop computing; a slowed rank idles before this returns.

        Args:
            before_update: whether only the update of the step remains, for which the others wait.
        """
        if self._open is None:
            return
        (phase, begin), self._open = self._open, None
        end = self._now(phase)
        if self.pace.speed < 1.0:
            end = self._idle(phase, begin, end, before_update)
        self._segments.append((phase, begin, end))

    def break_for_others(self) -> None:
        """Pause and resume in the same phase, so that a slowed rank idles before it sends to the others."""
        if self._open is not None and self.pace.speed < 1.0:
            phase = self._open[0]
            self.pause()
            self.resume(phase)

    def close_step(self, samples: int) -> list[StepTiming]:
        """End the step of `samples` samples; return the complete timings, oldest first."""
        self.pause()
        self.pace.end_step()
        self._steps.append((samples, self._segments))
        self._segments = []
        done = []
        while self._steps and all(_is_complete(segment) for segment in self._steps[0][1]):
            count, segments = self._steps.popleft()
            done.append(_timing(count, segments))
        return done

    def discard(self) -> None:
        """Discard the times since the last step, of work that is part of none."""
        self.pause()
        self.pace.discard()
        self._segments = []

    def _now(self, phase: Phase) -> _Instant:
        event = None if phase == "io" else accelerators.marked(self._device)
        return _Instant(time.perf_counter(), time.thread_time(), event)

    def _idle(self, phase: Phase, begin: _Instant, end: _Instant, before_update: bool) -> _Instant:
        if end.event is not None and begin.event is not None:
            end.event.synchronize()
            busy = wall = begin.event.elapsed_time(end.event) / 1e3
        else:
            busy, wall = end.busy - begin.busy, end.wall - begin.wall
        slept = self.pace.idle(
            busy, wall, is_loading=phase == "io", is_update=phase == "wu", before_update=before_update
        )
        return self._now(phase) if slept else end


def _is_complete(segment: _Segment) -> bool:
    event = segment[2].event
    return event is None or event.query()


def _timing(samples: int, segments: list[_Segment]) -> StepTiming:
    seconds: dict[Phase, float] = {"io": 0.0, "fb": 0.0, "wu": 0.0}
    for phase, begin, end in segments:
        if begin.event is not None and end.event is not None:
            seconds[phase] += begin.event.elapsed_time(end.event) / 1e3
        else:
            seconds[phase] += end.wall - begin.wall
    return StepTiming(samples=samples, **seconds)
