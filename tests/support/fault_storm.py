"""Kills and stops the nodes of a cluster, one a second, and starts the killed ones anew: a seeded storm."""

from __future__ import annotations

import heapq
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from support.command_cluster import Cluster

EVERY_SECONDS = 1.0
_LONGEST_STOP = 2.0
"""In patiences: half of the stopped nodes come back before anybody gives them up."""


@dataclass
class Storm:
    """See the first line.

    Attributes:
        ps: whose nodes suffer.
        names: of the nodes.
        words: with which they are started anew.
        patience: of the master.
        seed: decides who suffers what.
        done: how often each kind of fault was made.
    """

    ps: Cluster
    names: Sequence[str]
    words: Sequence[str]
    patience: float
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def rage(self, at_least: int, goes_on: Callable[[], bool]) -> None:
        """A fault a second, at least so many, until nothing goes on any more; then everybody is let go on."""
        self._random, self._sleepers = Random(self.seed), list[tuple[float, str]]()
        next_fault = time.monotonic()
        while goes_on():
            next_fault += EVERY_SECONDS
            self._strike()
            while (pause := min([next_fault, *(when for when, _ in self._sleepers)]) - time.monotonic()) > 0:
                time.sleep(pause)
                self._wake(time.monotonic())
                if time.monotonic() >= next_fault:
                    break
        self._wake(float("inf"))
        assert self.done.total() >= at_least, f"the run was over after {self.done.total()} faults"

    def _strike(self) -> None:
        name = self._random.choice(self.names)
        if self._random.random() < 0.5:
            self.done["killed"] += 1
            node = self.ps.nodes[name]
            node.kill()
            node.wait()
            self.ps.join(name, *self.words)
        else:
            self.done["stopped"] += 1
            self.ps.nodes[name].send_signal(signal.SIGSTOP)
            seconds = self._random.uniform(0.1, _LONGEST_STOP * self.patience)
            heapq.heappush(self._sleepers, (time.monotonic() + seconds, name))

    def _wake(self, now: float) -> None:
        while self._sleepers and self._sleepers[0][0] <= now:
            self.ps.nodes[heapq.heappop(self._sleepers)[1]].send_signal(signal.SIGCONT)
