"""Measures how long a task's model takes on a device by batch size; the shares follow from it.

    sizes 2, 4, 8 ... as far as memory and half of the time allow          first sweep, upwards
    on to the expected batch, if necessary in more time
    the same sizes again, until the time is over                           second sweep, downwards
    one optimizer step, a few times                                        the update

A size's time is the median of its passes, the typical time of a training step; the best pass would be too optimistic
for comparing nodes. A slowed node idles in portions and not equally after every pass, so there a pass is the mean of
several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from evener.benchmark.dry_run import DryRun, capacity
from evener.benchmark.timing import DeviceClock, rounds
from evener.comm.step_timing import Phase, StepTimer
from evener.oracle.cost.roofline import fit_line
from evener.records.errors import require
from evener.records.profile import BatchTiming, TaskTiming
from evener.system.memory import usable_memory

_MAX_PASSES = 50
_MIN_UPDATES = 3
_SLOWED_SECONDS = 0.04
_UPDATE_SHARE = 0.1
_MAX_SWEEP_SECONDS = 15.0
"""Maximum duration of the first sweep up to the expected batch."""


def time_task(
    trial: DryRun,
    timer: StepTimer,
    *,
    task: str,
    precision: str,
    largest: int,
    expected: int = 0,
    memory_limit: int | None = None,
    seconds: float = 1.5,
) -> TaskTiming:
    """Return the seconds of forward and backward by batch size, of the update, and the largest batch that fits.

    Args:
        trial: dry run to time; the time of its `fetch` does not count.
        timer: the rank's clock, outside a step; times include the slowing of the node.
        task: name of the task in the result.
        precision: precision in the result.
        largest: largest batch of interest.
        expected: usual batch. Sizes up to it are timed twice if that takes at most half a minute; otherwise its time is
            extrapolated.
        memory_limit: bytes that the user grants; None for all usable memory.
        seconds: approximate duration of the passes; longer if two passes of the smallest batch, or `expected`, need it.
            Finding the memory limit and timing the update take additional time: about three steps of four samples,
            and a tenth of `seconds`.

    Returns:
        The timings, at least of one size; `max_samples` is None if `largest` samples fit.

    Raises:
        DoesNotFit: not even one sample fits the memory.
        InvalidValue: `largest`, `memory_limit` or `seconds` is not positive.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    bound = capacity(trial, largest, usable_memory(str(trial.device), memory_limit)[1])
    passes = _PassTimer(trial, timer, DeviceClock(trial.device))
    batches = passes.sweep(batch_sizes(bound or largest), expected, seconds)
    update = passes.update(batches[0].samples, seconds * _UPDATE_SHARE)
    timer.discard()
    return TaskTiming(task=task, precision=precision, batches=batches, update_seconds=update, max_samples=bound)


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes to time up to `largest`: powers of two from 2, and `largest`.

    Size 1 is avoided: BatchNorm rejects a single value per channel.
    """
    powers = [1 << power for power in range(1, largest.bit_length()) if 1 << power < largest]
    return [*powers, largest]


def affine(timing: TaskTiming) -> tuple[float, float]:
    """Return (fixed_seconds, sample_seconds) of a step of n samples: fixed + sample * n, neither negative.

    The fixed part includes the seconds of the optimizer's update.
    """
    fixed, each = fit_line((batch.samples, batch.seconds) for batch in timing.batches)
    return fixed + timing.update_seconds, each


@dataclass
class _PassTimer:
    """Times passes of a dry run and keeps every pass by batch size."""

    trial: DryRun
    timer: StepTimer
    clock: DeviceClock
    passes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    fetch_seconds: dict[int, float] = field(default_factory=dict)

    def sweep(self, sizes: list[int], expected: int, seconds: float) -> tuple[BatchTiming, ...]:
        """Time as many of `sizes` as fit `seconds`, at least the first, up to `expected`: upwards, then downwards."""
        start = time.perf_counter()
        for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
            self._visit(size, seconds / 2 / len(sizes))
            spent = time.perf_counter() - start
            limit = seconds / 2 if size >= expected else max(seconds / 2, _MAX_SWEEP_SECONDS)
            if larger is None or spent + self._visit_seconds(size) * larger / size > limit:
                break
        end = start + max(seconds, 2 * (time.perf_counter() - start) if expected else 0)
        for size in sorted(self.passes, reverse=True):
            remaining = end - time.perf_counter()
            if self._visit_seconds(size) < remaining:
                self._visit(size, remaining / 2)
        return tuple(self._timing(size) for size in sorted(self.passes))

    def update(self, samples: int, seconds: float) -> float:
        """Return the seconds of one optimizer step."""
        self.trial.run_step(samples)
        return median(sum(self._mean(self._update)) for _ in rounds(seconds, _MIN_UPDATES, _MAX_PASSES))

    def _visit(self, samples: int, seconds: float) -> None:
        """Time at least one pass over one batch for about `seconds`, after a pass that does not count."""
        start = time.perf_counter()
        batch = self.trial.fetch(samples)
        self.fetch_seconds[samples] = time.perf_counter() - start
        self._pass(batch)
        for _ in rounds(seconds, 1, _MAX_PASSES):
            self.passes.setdefault(samples, []).append(self._mean(partial(self._pass, batch)))

    def _visit_seconds(self, samples: int) -> float:
        """Return the seconds of the shortest visit to a size."""
        return self.fetch_seconds[samples] + 2 * sum(min(self.passes[samples], key=sum))

    def _pass(self, batch: object) -> tuple[float, float]:
        """Return the (forward, backward) seconds of one pass."""
        trial, loss = self.trial, list[torch.Tensor]()
        trial.clear_gradients()
        forward = self._time("fb", lambda: loss.append(trial.loss_step(trial.model, batch)))
        backward = self._time("fb", lambda: loss.pop().backward())  # type: ignore[no-untyped-call]
        return forward, backward

    def _update(self) -> tuple[float, float]:
        return self._time("wu", self.trial.optimizer.step), 0.0

    def _mean(self, run: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Return the mean two seconds of `run`, over as many runs as it takes to average out a slowed node's idling."""
        runs = [run()]
        while self.timer.pace.speed < 1 and sum(map(sum, runs)) < _SLOWED_SECONDS:
            runs.append(run())
        return sum(first for first, _ in runs) / len(runs), sum(second for _, second in runs) / len(runs)

    def _time(self, phase: Phase, work: Callable[[], object]) -> float:
        """Return the seconds of `work`, including the idling of a slowed node."""

        def paced() -> None:
            self.timer.resume(phase)
            work()
            self.timer.pause()

        return self.clock.time(paced)

    def _timing(self, samples: int) -> BatchTiming:
        forward = median(forward for forward, _ in self.passes[samples])
        backward = median(backward for _, backward in self.passes[samples])
        return BatchTiming(samples=samples, forward_seconds=forward, backward_seconds=backward)
