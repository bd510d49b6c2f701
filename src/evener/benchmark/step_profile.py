"""Profiles a step: all ranks perform their parts alone, at the same time, and record their events."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from math import inf, isinf
from typing import TypeAlias

from evener.benchmark.fake_group import EventTrace
from evener.comm.group import Group
from evener.oracle.replay import TraceEvent
from evener.records.errors import require

WARM_UP_STEPS = 2
"""Steps that do not count: DistributedDataParallel reorders its buckets after the first one."""
_MAX_ROUNDS = 7

Step: TypeAlias = Callable[[], object]


def profile_step(
    group: Group, trace: EventTrace, prepare: Callable[[], Step], seconds: float, rounds: int = _MAX_ROUNDS
) -> list[tuple[TraceEvent, ...]]:
    """Return the events of up to `rounds` steps, the same number on every rank; `prepare` returns the step function.

    All steps take about `seconds`, more if three steps take longer. The result is empty, with a warning, if a rank
    cannot perform its part: a GPU may lack memory for a second copy of the weights, and a failed forecast must not end
    a run.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    step, slowest = _warm_up(group, trace, prepare)
    if step is None:
        return []
    rounds = max(1, min(rounds, _MAX_ROUNDS, int(seconds / slowest) - WARM_UP_STEPS))
    steps = []
    for _ in range(rounds):
        group.barrier()
        steps.append(_round(trace, step))
    return steps


def _warm_up(group: Group, trace: EventTrace, prepare: Callable[[], Step]) -> tuple[Step | None, float]:
    """Return the step function and the slowest rank's seconds of the last step; None if a rank cannot perform it.

    All ranks exchange the result after every step, so that they stay synchronised even if a rank fails in its step.
    """
    step: Step | None = None
    slowest = inf
    for _ in range(WARM_UP_STEPS):
        duration = inf
        try:
            step = step or prepare()
            start = time.perf_counter()
            _round(trace, step)
            duration = time.perf_counter() - start
        except Exception as error:
            warnings.warn(f"this rank cannot profile a step, so nothing is predicted: {error!r}", stacklevel=3)
        (slowest,) = group.all_reduce_max([duration])
        if isinf(slowest):
            return None, inf
    return step, slowest


def _round(trace: EventTrace, step: Step) -> tuple[TraceEvent, ...]:
    trace.start()
    step()
    return trace.finish()
