"""Shares that follow the machines: from what steps took, decide whether to divide the work anew.

A node's cost is its affine prediction times a factor, the median of measured / predicted over its last steps: a median
shrugs off a single slow step, and follows a lasting change after half a window. The work is divided anew when that is
predicted to shorten the step by more than a threshold, so that noise does not move shares about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from evener.oracle.apportion import Worker, apportion, finish_seconds


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now.

    Attributes:
        balance: to go on with.
        shares: of a full micro-batch from now on; None to leave them.
        gain: predicted seconds of a step before by after, minus one.
    """

    balance: Balance
    shares: tuple[int, ...] | None = None
    gain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What is known about the nodes' costs, and how the work is divided now.

    Attributes:
        workers: predicted cost of n samples, one a node.
        shares: of a full micro-batch, one a node.
        factors: the last measured / predicted seconds of every node, oldest first.
        window: steps that a factor looks back.
        threshold: gain from which the work is divided anew.
    """

    workers: tuple[Worker, ...]
    shares: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    window: int = 5
    threshold: float = 0.04

    def observe(self, samples: Sequence[int], seconds: Sequence[float]) -> Balance:
        """The balance after a step in which node i computed `samples[i]` in `seconds[i]`."""
        known = self.factors or ((),) * len(self.workers)
        factors = tuple(
            (*past, took / worker.seconds(n))[-self.window :] if n and took > 0 else past
            for past, worker, n, took in zip(known, self.workers, samples, seconds, strict=True)
        )
        return replace(self, factors=factors)

    @property
    def current_workers(self) -> tuple[Worker, ...]:
        """The workers at their speed of the last steps."""
        known = self.factors or ((),) * len(self.workers)
        return tuple(_scaled(w, median(past) if past else 1.0) for w, past in zip(self.workers, known, strict=True))

    def decide(self) -> Decision:
        """Divide anew if that is predicted to pay; only once every node was observed for most of a window."""
        enough = [len(past) > self.window // 2 for past in self.factors]
        if not enough or not all(e or n == 0 for e, n in zip(enough, self.shares, strict=True)):
            return Decision(balance=self)
        workers = self.current_workers
        shares = apportion(sum(self.shares), workers)
        gain = finish_seconds(self.shares, workers) / finish_seconds(shares, workers) - 1
        if shares == self.shares or gain <= self.threshold:
            return Decision(balance=self, gain=gain)
        balance = replace(self, workers=workers, shares=shares, factors=())
        return Decision(balance=balance, shares=shares, gain=gain)


def _scaled(worker: Worker, factor: float) -> Worker:
    return replace(worker, unit_seconds=worker.unit_seconds * factor, fixed_seconds=worker.fixed_seconds * factor)
