"""A forked replica that measures the duration of a step at full speed, while no other rank computes.

A slowed node is throttled to these seconds (`pace.py`). They cannot be measured during the run, because the nodes that
share its CPU compute at the same time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from evener.comm.group import Group
from evener.comm.step_timing import StepTiming
from evener.frontends.programs.batch_parts import STAND_IN, BatchPart
from evener.frontends.programs.forked_replica import ForkedReplica
from evener.launch.rank_environment import RankEnvironment
from evener.records.profile import BatchTiming, TaskTiming

_COLD = 2
"""Warm-up steps, which are not measured."""
_PATIENCE = 4
"""Factor of the seconds of a timing after which a replica without steps ends."""
_MIN_STEPS = 2
"""Measured steps: one of each size."""


class _TimedSteps(NamedTuple):
    """Seconds of passes by their number of samples, and of updates."""

    by_samples: dict[int, list[float]]
    updates: list[float]

    def add(self, timing: StepTiming, is_loading: bool) -> None:
        """Add a step; `is_loading` says that it loaded its batch itself."""
        seconds = timing.fb + (timing.io if is_loading else 0.0)
        self.by_samples.setdefault(timing.samples, []).append(seconds)
        self.updates.append(timing.wu)

    def timing(self) -> TaskTiming:
        """Return the median of each size; of updates the mean, as not every step may have one."""
        batches = [
            BatchTiming(samples=samples, forward_seconds=median(passes), backward_seconds=0.0)
            for samples, passes in sorted(self.by_samples.items())
        ]
        return TaskTiming(
            task="program", precision="own", batches=tuple(batches), update_seconds=fmean(self.updates or [0.0])
        )


class TimingProbe(ForkedReplica):
    """A replica that continues alone, with equal parts of batches and halves of such parts in turn.

    Args:
        group: the rank's; `begin` reduces it to this replica.
        path: of a TaskTiming, as JSON.
        seconds: time after which it ends, if it has timed both sizes.
    """

    def __init__(self, group: Group, path: Path, seconds: float) -> None:
        super().__init__(group, path, samples=sys.maxsize)
        self._nodes, self._seconds = group.size, seconds
        self._passes = _TimedSteps({}, [])
        self._owner: object = None
        self._begin = 0.0
        self._samples = self._steps = 0

    def begin(self, env: RankEnvironment, token: str | None = None) -> None:
        """Begin alone."""
        super().begin(env, token)
        self._begin = time.perf_counter()

    def sizes(self, count: int) -> Sequence[int]:
        """Return the samples of the next step, in a batch of `count`; the others are left out."""
        return (max(min(STAND_IN, count), count // (self._nodes << self._steps % 2)),)

    def begin_step(self, owner: object, part: BatchPart) -> None:
        """Begin a step, unless one with a batch of another owner is under way."""
        if not self._samples:
            self._owner, self._samples = owner, part.loaded

    def end_step(self, owner: object) -> None:
        """Record the seconds of the step, and end the replica when its time is over."""
        if not self._samples:
            self.group.timer.discard()
        if not self._samples or owner is not self._owner:
            return
        samples, self._samples = self._samples, 0
        (timing,) = self.group.timer.close_step(samples)
        self._steps += 1
        if self._steps > _COLD:
            self._passes.add(timing, is_loading=not getattr(owner, "num_workers", 0))
        is_over = time.perf_counter() > self._begin + self._seconds
        if is_over and self._steps >= _COLD + _MIN_STEPS:
            self.end()

    def next_batch(self) -> None:
        """Do nothing, because the next batch of the same owner ends a step."""

    def end_pass(self, *, is_over: bool) -> None:
        """Do nothing, because the replica continues with the program's next pass."""

    def before_update(self) -> None:
        """End a program that never loads another batch, so that no step ends."""
        if time.perf_counter() > self._begin + _PATIENCE * self._seconds:
            self.end()

    def write(self, path: Path) -> None:
        """Write the timing. Raises ValueError if no step was timed."""
        path.write_bytes(msgspec.json.encode(self._passes.timing()))
