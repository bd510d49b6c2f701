"""Rehearses a rank's part of a training step: the others are silent, nothing is sent, nothing is kept.

All ranks rehearse at the same time, so that what they share (a memory bus, a core) is shared as in a run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from math import inf, isinf
from typing import TypeAlias

from evener.benchmark.score import Score
from evener.comm.group import Group
from evener.errors import require
from evener.oracle.replay import TraceEvent

WARM_UP = 2
"""Steps that do not count: DistributedDataParallel sorts its buckets anew after the first one."""
_MOST_ROUNDS = 7

Step: TypeAlias = Callable[[], object]


def rehearse(
    group: Group, score: Score, prepare: Callable[[], Step], seconds: float, rounds: int = _MOST_ROUNDS
) -> list[tuple[TraceEvent, ...]]:
    """The beats of some steps, as many on every rank.

    Args:
        group: the ranks that rehearse.
        score: of this rank in the silence.
        prepare: returns what performs one step of its part.
        seconds: for all of them, about; exceeded where three steps take longer.
        rounds: that count, at most.

    Returns:
        Nothing if a rank cannot rehearse, of which it warns: a GPU may have no memory for a second copy of weights.
        A forecast that fails must not end a run that could go on without it.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    step, taken = _warm_up(score, prepare)
    (slowest,) = group.all_reduce_max([taken])
    if step is None or isinf(slowest):
        return []
    rounds = max(1, min(rounds, _MOST_ROUNDS, int(seconds / slowest) - WARM_UP))
    beats = []
    for _ in range(rounds):
        group.barrier()
        beats.append(_round(score, step))
    return beats


def _warm_up(score: Score, prepare: Callable[[], Step]) -> tuple[Step | None, float]:
    """What performs a step, and the seconds of the last one of some; nothing and infinity if this rank cannot do it."""
    taken = inf
    try:
        step = prepare()
        for _ in range(WARM_UP):
            start = time.perf_counter()
            _round(score, step)
            taken = time.perf_counter() - start
    except Exception as error:
        warnings.warn(f"this rank cannot rehearse a step, so nothing is predicted: {error!r}", stacklevel=2)
        return None, inf
    return step, taken


def _round(score: Score, step: Step) -> tuple[TraceEvent, ...]:
    score.start()
    step()
    return score.finish()
