"""The timeline of a step, its idle share, and its trace for trace viewers."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import torch

from evener.comm.step_timing import StepTimer
from evener.oracle.schedule import Action, Kind
from evener.records.schema import Part
from evener.system import accelerators


class StageEvent(Part, frozen=True, kw_only=True):
    """One action of one stage: when it computed, without waiting, in seconds of the monotonic clock."""

    stage: int
    micro_batch: int
    kind: Kind
    begin: float
    end: float


class Timeline(Part, frozen=True, kw_only=True):
    """All actions of a step."""

    num_stages: int
    events: tuple[StageEvent, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first beginning to the last end."""
        return max(event.end for event in self.events) - min(event.begin for event in self.events)

    def busy_seconds(self, stage: int) -> float:
        """Return the seconds in which `stage` computed."""
        return sum(event.end - event.begin for event in self.events if event.stage == stage)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they were idle: (K-1) / (M+K-1) if all stages are equal."""
        busy = sum(self.busy_seconds(stage) for stage in range(self.num_stages))
        return 1 - busy / (self.num_stages * self.seconds)

    def chrome_trace(self) -> bytes:
        """Return the timeline as JSON for chrome://tracing and ui.perfetto.dev, one row per stage."""
        start = min(event.begin for event in self.events)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
            for stage in range(self.num_stages)
        ]
        boxes = [
            {
                "ph": "X",
                "name": f"{event.kind} {event.micro_batch}",
                "cat": event.kind,
                "pid": 0,
                "tid": event.stage,
                "ts": (event.begin - start) * 1e6,
                "dur": (event.end - event.begin) * 1e6,
            }
            for event in self.events
        ]
        return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": names + boxes})


class _Moment(NamedTuple):
    """A moment, on the clock of the machine or in the queue of an accelerator."""

    wall: float
    event: torch.Event | None = None


class StageClock:
    """Times the actions of one stage, without waiting for a GPU: times are read later.

    The clock also reports computing and waiting to the rank's `timer`, which may slow the rank down.
    """

    def __init__(self, stage: int, device: torch.device, timer: StepTimer | None = None) -> None:
        self._stage, self._device, self._timer = stage, device, timer
        self._begin = _Moment(0.0)
        self._marks: list[tuple[Action, _Moment, _Moment]] = []

    def start(self) -> None:
        """Start to time an action."""
        if self._timer is not None:
            self._timer.resume("fb")
        self._begin = self._now()

    def stop(self, action: Action) -> None:
        """Stop timing `action`."""
        if self._timer is not None:
            self._timer.pause()
        self._marks.append((action, self._begin, self._now()))

    def clear(self) -> None:
        """Forget the recorded times."""
        self._marks = []

    def events(self) -> list[StageEvent]:
        """Return the actions since the last `clear`; this waits for the device."""
        reference = self._now()
        if reference.event is not None:
            reference.event.synchronize()
            reference = reference._replace(wall=time.perf_counter())
        return [
            StageEvent(
                stage=self._stage,
                micro_batch=action.micro_batch,
                kind=action.kind,
                begin=_seconds(begin, reference),
                end=_seconds(end, reference),
            )
            for action, begin, end in self._marks
        ]

    def _now(self) -> _Moment:
        return _Moment(time.perf_counter(), accelerators.marked(self._device))


def _seconds(mark: _Moment, reference: _Moment) -> float:
    if mark.event is None or reference.event is None:
        return mark.wall
    return reference.wall - float(mark.event.elapsed_time(reference.event)) / 1e3
