"""Shares that follow the machines: from what steps took, decide whether to divide the work anew.

A node's cost is its affine prediction times a factor, the median of measured / predicted over its last steps: a median
shrugs off a single slow step. The work is divided anew when that is predicted to shorten the step by more than the few
steps behind the prediction could promise by chance: a large gain is believed after 3 steps, a small one after 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from evener.oracle.apportion import Worker, apportion, finish_seconds

CONFIDENCE: tuple[tuple[int, float], ...] = ((3, 0.35), (6, 0.15), (16, 0.05))
"""(steps behind a prediction, gain from which it is acted upon)."""

AT_FIRST: tuple[tuple[int, float], ...] = ((4, 0.04),)
"""Likewise for the first decision: what a short trial promised is worth less than the first steps of the run itself."""


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
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
        is_tried: whether the first steps of the run have confirmed or corrected the trial's promise.
    """

    workers: tuple[Worker, ...]
    shares: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    is_tried: bool = False

    def observe(self, samples: Sequence[int], seconds: Sequence[float]) -> Balance:
        """The balance after a step in which node i computed `samples[i]` in `seconds[i]`."""
        known = self.factors or ((),) * len(self.workers)
        factors = tuple(
            (*past, took / worker.seconds(n))[-CONFIDENCE[-1][0] :] if n and took > 0 else past
            for past, worker, n, took in zip(known, self.workers, samples, seconds, strict=True)
        )
        return replace(self, factors=factors)

    def decide(self) -> Rebalancing:
        """Divide anew if that is predicted to pay, by as many of the last steps as the gain needs to be believed."""
        decision, tried = Rebalancing(balance=self), self.is_tried
        for steps, least_gain in CONFIDENCE if self.is_tried else AT_FIRST:
            if not self._has_seen(steps):
                break
            tried, decision = True, self._divide(self._workers_now(steps))
            if decision.shares is not None and decision.gain > least_gain:
                return decision
        return Rebalancing(balance=replace(self, is_tried=tried), gain=decision.gain)

    def _has_seen(self, steps: int) -> bool:
        """Whether every node that has samples was timed in so many steps."""
        return bool(self.factors) and all(
            len(past) >= steps or n == 0 for past, n in zip(self.factors, self.shares, strict=True)
        )

    def _workers_now(self, steps: int) -> tuple[Worker, ...]:
        """The workers at their speed of the last `steps`."""
        return tuple(
            _scaled(worker, median(past[-steps:]) if past else 1.0)
            for worker, past in zip(self.workers, self.factors, strict=True)
        )

    def _divide(self, workers: tuple[Worker, ...]) -> Rebalancing:
        shares = apportion(sum(self.shares), workers)
        gain = finish_seconds(self.shares, workers) / finish_seconds(shares, workers) - 1
        balance = replace(self, workers=workers, shares=shares, factors=(), is_tried=True)
        return Rebalancing(balance=balance, shares=shares if shares != self.shares else None, gain=gain)


def _scaled(worker: Worker, factor: float) -> Worker:
    return replace(worker, unit_seconds=worker.unit_seconds * factor, fixed_seconds=worker.fixed_seconds * factor)
