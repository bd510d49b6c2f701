"""A copy of a rank that finds out what a step takes it at full speed, with nobody beside it.

A slowed node is held to these seconds (`pace.py`). While the run goes on they cannot be measured: the nodes that it
shares a processor with compute at the same time.
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
from evener.frontends.programs.understudy import Understudy
from evener.launch.rank_environment import RankEnvironment
from evener.records.profile import BatchTiming, TaskTiming

_COLD = 2
"""Steps at the beginning that do not count."""
_PATIENCE = 4
"""Times the seconds of a timing, after which a copy ends that has no steps."""
_LEAST = 2
"""Steps that do: one of each size."""


class _TimedSteps(NamedTuple):
    """Seconds of passes by their samples, and of updates."""

    by_samples: dict[int, list[float]]
    updates: list[float]

    def add(self, timing: StepTiming, is_loading: bool) -> None:
        """A step; `is_loading`: it loaded its batch itself."""
        seconds = timing.fb + (timing.io if is_loading else 0.0)
        self.by_samples.setdefault(timing.samples, []).append(seconds)
        self.updates.append(timing.wu)

    def timing(self) -> TaskTiming:
        """The median of each size's; of updates the mean, as not every step may have one."""
        batches = [
            BatchTiming(samples=samples, forward_seconds=median(passes), backward_seconds=0.0)
            for samples, passes in sorted(self.by_samples.items())
        ]
        return TaskTiming(
            task="program", precision="own", batches=tuple(batches), update_seconds=fmean(self.updates or [0.0])
        )


class TimedCopy(Understudy):
    """Goes on alone with equal parts of batches, and halves of such parts in turn.

    Args:
        group: as of an Understudy.
        path: of a TaskTiming, as JSON.
        seconds: after which it ends, as soon as it has timed both sizes.
    """

    def __init__(self, group: Group, path: Path, seconds: float) -> None:
        super().__init__(group, path, samples=sys.maxsize)
        self._nodes, self._seconds = group.size, seconds
        self._passes = _TimedSteps({}, [])
        self._owner: object = None
        self._begin = 0.0
        self._samples = self._steps = 0

    def begin(self, env: RankEnvironment, token: str | None = None) -> None:
        """As an Understudy, always alone."""
        super().begin(env, token)
        self._begin = time.perf_counter()

    def sizes(self, count: int) -> Sequence[int]:
        """Samples of the next step, of a batch of `count`: the rest is left out."""
        return (max(min(STAND_IN, count), count // (self._nodes << self._steps % 2)),)

    def begin_step(self, owner: object, part: BatchPart) -> None:
        """A step begins, unless one goes on, with a batch of another owner."""
        if not self._samples:
            self._owner, self._samples = owner, part.loaded

    def end_step(self, owner: object) -> None:
        """Keep its seconds; enough is known when the time is over."""
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
        if is_over and self._steps >= _COLD + _LEAST:
            self.end()

    def next_batch(self) -> None:
        """Nothing is to be done: what ends a step is that its own batch is followed by another one."""

    def before_update(self) -> None:
        """A program that goes on with one batch ends no step: it is not timed."""
        if time.perf_counter() > self._begin + _PATIENCE * self._seconds:
            self.end()

    def write(self, path: Path) -> None:
        """What was found. Raises ValueError: nothing was timed."""
        path.write_bytes(msgspec.json.encode(self._passes.timing()))
