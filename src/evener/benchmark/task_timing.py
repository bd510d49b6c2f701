"""How long a task's model takes on a device by batch size: the measure that decides the shares.

    sizes 2, 4, 8 ... as far as memory and half of the time allow          first sweep, upwards
    on to the batch that is expected, if need be in more time
    the same sizes again, until the time is over                           second sweep, downwards
    one optimiser step, a few times                                        the update

A size's time is the median of its passes, as a training step takes as a rule: the best pass would flatter, and the
nodes are compared with each other by these times. On a node slowed down by its `Pace`, which idles in portions and not
equally after every pass, a pass is the mean of several.
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

_MOST_PASSES = 50
_LEAST_UPDATES = 3
_SLOWED_SECONDS = 0.04
_UPDATE_SHARE = 0.1
_MOST_SECONDS = 15.0
"""Of the first sweep, to come to the batch that is expected."""


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
    """Seconds of forward and backward by batch size, of the update, and the largest batch that fits.

    Args:
        trial: what is timed; the time of its `fetch` is not counted.
        timer: the rank's clock, outside a step; the times are those of the node as slowed by it.
        task: named in the result.
        precision: likewise.
        largest: batch that will ever be asked for.
        expected: batch that will be asked for as a rule: sizes up to it are timed, each twice, if that takes no more
            than half a minute. From smaller ones alone its time is a guess.
        memory_limit: bytes that the user grants; None for all that are usable.
        seconds: for the passes, about; exceeded where two of the smallest batch take longer, or `expected` does.
            Finding what fits the memory and timing the update come on top: some three steps of four samples, and a
            tenth of `seconds`.

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
    """The sizes worth timing up to `largest`: powers of two from 2, and `largest`.

    Not 1, if it can be helped: BatchNorm refuses a single value a channel.
    """
    powers = [1 << power for power in range(1, largest.bit_length()) if 1 << power < largest]
    return [*powers, largest]


def affine(timing: TaskTiming) -> tuple[float, float]:
    """The (fixed_seconds, sample_seconds) of a step of n samples: fixed + sample * n, neither negative.

    The seconds of the optimiser's update are added to the fixed part.
    """
    fixed, each = fit_line((batch.samples, batch.seconds) for batch in timing.batches)
    return fixed + timing.update_seconds, each


@dataclass
class _PassTimer:
    """Times passes of a trial, keeping every pass by batch size."""

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
            most = seconds / 2 if size >= expected else max(seconds / 2, _MOST_SECONDS)
            if larger is None or spent + self._visit_seconds(size) * larger / size > most:
                break
        end = start + max(seconds, 2 * (time.perf_counter() - start) if expected else 0)
        for size in sorted(self.passes, reverse=True):
            remaining = end - time.perf_counter()
            if self._visit_seconds(size) < remaining:
                self._visit(size, remaining / 2)
        return tuple(self._timing(size) for size in sorted(self.passes))

    def update(self, samples: int, seconds: float) -> float:
        """Seconds of one optimiser step."""
        self.trial.run_step(samples)
        return median(sum(self._mean(self._update)) for _ in rounds(seconds, _LEAST_UPDATES, _MOST_PASSES))

    def _visit(self, samples: int, seconds: float) -> None:
        """Time passes over one batch for about `seconds`, at least one, after one that does not count."""
        start = time.perf_counter()
        batch = self.trial.fetch(samples)
        self.fetch_seconds[samples] = time.perf_counter() - start
        self._pass(batch)
        for _ in rounds(seconds, 1, _MOST_PASSES):
            self.passes.setdefault(samples, []).append(self._mean(partial(self._pass, batch)))

    def _visit_seconds(self, samples: int) -> float:
        """What the shortest visit to a size takes."""
        return self.fetch_seconds[samples] + 2 * sum(min(self.passes[samples], key=sum))

    def _pass(self, batch: object) -> tuple[float, float]:
        """(forward, backward) seconds of one pass."""
        trial, loss = self.trial, list[torch.Tensor]()
        trial.clear_gradients()
        forward = self._time("fb", lambda: loss.append(trial.loss_step(trial.model, batch)))
        backward = self._time("fb", lambda: loss.pop().backward())  # type: ignore[no-untyped-call]
        return forward, backward

    def _update(self) -> tuple[float, float]:
        return self._time("wu", self.trial.optimizer.step), 0.0

    def _mean(self, run: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """The two seconds of one `run`, or of as many as it takes for a slowed node's idling to average out."""
        runs = [run()]
        while self.timer.pace.speed < 1 and sum(map(sum, runs)) < _SLOWED_SECONDS:
            runs.append(run())
        return sum(first for first, _ in runs) / len(runs), sum(second for _, second in runs) / len(runs)

    def _time(self, phase: Phase, work: Callable[[], object]) -> float:
        """Seconds of `work`, with the idling of a slowed node."""

        def paced() -> None:
            self.timer.resume(phase)
            work()
            self.timer.pause()

        return self.clock.time(paced)

    def _timing(self, samples: int) -> BatchTiming:
        forward = median(forward for forward, _ in self.passes[samples])
        backward = median(backward for _, backward in self.passes[samples])
        return BatchTiming(samples=samples, forward_seconds=forward, backward_seconds=backward)
