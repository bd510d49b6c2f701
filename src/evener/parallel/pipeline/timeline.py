"""Who computed which micro-batch when: the timeline of a step, its idle share, and a file for trace viewers."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import torch

from evener.comm.step_timing import StepTimer
from evener.oracle.schedule import Action, Kind
from evener.records.schema import Part


class StageEvent(Part, frozen=True, kw_only=True):
    """One action of one stage: when it computed (waiting is no part of it), in seconds of the monotonic clock."""

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
        """From the first beginning to the last end."""
        return max(event.end for event in self.events) - min(event.begin for event in self.events)

    def busy_seconds(self, stage: int) -> float:
        """For which `stage` computed."""
        return sum(event.end - event.begin for event in self.events if event.stage == stage)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they computed nothing: (K-1) / (M+K-1) if all stages are equal."""
        busy = sum(self.busy_seconds(stage) for stage in range(self.num_stages))
        return 1 - busy / (self.num_stages * self.seconds)

    def chrome_trace(self) -> bytes:
        """The timeline as a file that chrome://tracing and ui.perfetto.dev open: JSON, a row a stage."""
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
    """A moment: by the clock of the machine, or in the stream of a GPU."""

    wall: float
    event: torch.cuda.Event | None = None


class StageClock:
    """Times the actions of one stage; what it reads is read later, so that a GPU is not waited for.

    The rank's `timer` is told when it computes and when it waits; it may slow the rank down.
    """

    def __init__(self, stage: int, device: torch.device, timer: StepTimer | None = None) -> None:
        self._stage, self._device, self._timer = stage, device, timer
        self._begin = _Moment(0.0)
        self._marks: list[tuple[Action, _Moment, _Moment]] = []

    def start(self) -> None:
        """An action begins to compute."""
        if self._timer is not None:
            self._timer.resume("fb")
        self._begin = self._now()

    def stop(self, action: Action) -> None:
        """It has computed."""
        if self._timer is not None:
            self._timer.pause()
        self._marks.append((action, self._begin, self._now()))

    def clear(self) -> None:
        """Forget what was timed."""
        self._marks = []

    def events(self) -> list[StageEvent]:
        """What was timed since the last `clear`; waits for the device."""
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
        if self._device.type != "cuda":
            return _Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Moment(time.perf_counter(), event)


def _seconds(mark: _Moment, reference: _Moment) -> float:
    if mark.event is None or reference.event is None:
        return mark.wall
    return reference.wall - float(mark.event.elapsed_time(reference.event)) / 1e3
