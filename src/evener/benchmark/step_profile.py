"""All ranks perform their parts of some steps alone, at the same time, and note what they do: a rehearsal."""

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

WARM_UP = 2
"""Steps that do not count: DistributedDataParallel sorts its buckets anew after the first one."""
_MOST_ROUNDS = 7

Step: TypeAlias = Callable[[], object]


def rehearse(
    group: Group, trace: EventTrace, prepare: Callable[[], Step], seconds: float, rounds: int = _MOST_ROUNDS
) -> list[tuple[TraceEvent, ...]]:
    """The beats of some steps, as many on every rank, that `prepare` returns what performs; at most `rounds`.

    All together take about `seconds`, more where three steps take longer. Nothing if a rank cannot rehearse, of which
    it warns: a GPU may have no memory for a second copy of weights, and a forecast that fails must not end a run.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    step, slowest = _warm_up(group, trace, prepare)
    if step is None:
        return []
    rounds = max(1, min(rounds, _MOST_ROUNDS, int(seconds / slowest) - WARM_UP))
    beats = []
    for _ in range(rounds):
        group.barrier()
        beats.append(_round(trace, step))
    return beats


def _warm_up(group: Group, trace: EventTrace, prepare: Callable[[], Step]) -> tuple[Step | None, float]:
    """What performs a step, and the seconds of the last one of some on the slowest rank; nothing if a rank cannot.

    All ranks learn so after every step: they stay in step, although one may have left its own in the middle.
    """
    step: Step | None = None
    slowest = inf
    for _ in range(WARM_UP):
        taken = inf
        try:
            step = step or prepare()
            start = time.perf_counter()
            _round(trace, step)
            taken = time.perf_counter() - start
        except Exception as error:
            warnings.warn(f"this rank cannot rehearse a step, so nothing is predicted: {error!r}", stacklevel=3)
        (slowest,) = group.all_reduce_max([taken])
        if isinf(slowest):
            return None, inf
    return step, slowest


def _round(trace: EventTrace, step: Step) -> tuple[TraceEvent, ...]:
    trace.start()
    step()
    return trace.finish()
