"""Profiles a rank's part of a training step for the oracle's replay: fake peers, nothing is sent, nothing is kept.

The trace says when the rank computes, when it begins an exchange and when it needs the result. Nobody waits for fake
peers, so all the time of a step is the rank's own: computing, the idling of a slowed node, and what Python takes.
All ranks perform their parts at the same time, so that what they share (a memory bus, a core) is shared as in a run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isinf
from typing import TypeAlias

import torch

from evener.benchmark.timing import now
from evener.comm.group import Group
from evener.errors import require
from evener.oracle.replay import ExchangeKind, TraceEvent

WARM_UP = 2
"""Steps that do not count: DistributedDataParallel sorts its buckets anew after the first one."""
_MOST_ROUNDS = 7

Step: TypeAlias = Callable[[], object]


class EventTrace:
    """The beats of one rank, as they are played.

    Args:
        device: that computes; a GPU is waited for at every beat.

    Attributes:
        kind: of what is exchanged next, as traffic is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = ""
        self._beats: list[TraceEvent] = []
        self._begun = 0
        self._open: set[int] = set()
        self._computing = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """From now on time counts."""
        self._since = now(self._device)

    def stop(self) -> None:
        """From now on time does not count."""
        if self._since is not None:
            self._computing += now(self._device) - self._since
        self._since = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, time does not count."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self.start()

    def begin(self, kind: ExchangeKind, ranks: tuple[int, ...], nbytes: int) -> int:
        """An exchange begins; its number."""
        number, self._begun = self._begun, self._begun + 1
        self._beats.append(
            TraceEvent(computing=self._taken(), act="begin", exchange=number, kind=kind, ranks=ranks, nbytes=nbytes)
        )
        self._open.add(number)
        return number

    def need(self, number: int) -> None:
        """The result of an exchange is needed now."""
        if number in self._open:
            self._open.remove(number)
            self._beats.append(TraceEvent(computing=self._taken(), act="need", exchange=number))

    def need_all(self) -> None:
        """The results of all exchanges are needed now that have begun."""
        for number in sorted(self._open):
            self.need(number)

    def finish(self) -> tuple[TraceEvent, ...]:
        """The step is over; its beats. The next one begins."""
        self.stop()
        self.need_all()
        beats = (*self._beats, TraceEvent(computing=self._taken()))
        self._beats, self._begun = [], 0
        return beats

    def _taken(self) -> float:
        """Seconds computed since the last beat."""
        if self._since is not None:
            self.stop()
            self.start()
        taken, self._computing = self._computing, 0.0
        return taken


def rehearse(
    group: Group, trace: EventTrace, prepare: Callable[[], Step], seconds: float, rounds: int = _MOST_ROUNDS
) -> list[tuple[TraceEvent, ...]]:
    """The beats of some steps, as many on every rank.

    Args:
        group: the ranks that rehearse.
        trace: of this rank in the silence.
        prepare: returns what performs one step of its part.
        seconds: for all of them, about; exceeded where three steps take longer.
        rounds: that count, at most.

    Returns:
        Nothing if a rank cannot rehearse, of which it warns: a GPU may have no memory for a second copy of weights.
        A forecast that fails must not end a run that could go on without it.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    step, taken = _warm_up(trace, prepare)
    (slowest,) = group.all_reduce_max([taken])
    if step is None or isinf(slowest):
        return []
    rounds = max(1, min(rounds, _MOST_ROUNDS, int(seconds / slowest) - WARM_UP))
    beats = []
    for _ in range(rounds):
        group.barrier()
        beats.append(_round(trace, step))
    return beats


def _warm_up(trace: EventTrace, prepare: Callable[[], Step]) -> tuple[Step | None, float]:
    """What performs a step, and the seconds of the last one of some; nothing and infinity if this rank cannot do it."""
    taken = inf
    try:
        step = prepare()
        for _ in range(WARM_UP):
            start = time.perf_counter()
            _round(trace, step)
            taken = time.perf_counter() - start
    except Exception as error:
        warnings.warn(f"this rank cannot rehearse a step, so nothing is predicted: {error!r}", stacklevel=2)
        return None, inf
    return step, taken


def _round(trace: EventTrace, step: Step) -> tuple[TraceEvent, ...]:
    trace.start()
    step()
    return trace.finish()
