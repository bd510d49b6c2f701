"""Writes down what a rank does in a step: when it computes, when it begins an exchange, when it needs the result.

In silence nobody is waited for, so all the time of a step is the rank's own: computing, the idling of a slowed node,
and what Python takes. Only where the score is stopped does it not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evener.benchmark.clock import now
from evener.oracle.replay import ExchangeKind, TraceEvent


class Score:
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
