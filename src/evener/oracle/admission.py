"""Whether a node that comes to a run of data parallelism makes a step shorter. Pure.

    a step = the slowest node's computing + the last gradients' ring     or the ring of all gradients, if that is longer

The ring of those who are there is known as measured; how much slower it is with the newcomer follows from its line to
the master, compared with the slowest of theirs: what a message takes there besides the line itself, it takes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.oracle.apportion import Worker, apportion, finish_seconds
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.oracle.data_parallel import GradientSync


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of a step, without a newcomer and with it."""

    before: float
    after: float

    @property
    def is_shorter(self) -> bool:
        """Whether a step is shorter with it."""
        return self.after < self.before

    @property
    def words(self) -> str:
        """For the user."""
        return f"{self.after:.3g} s are predicted with it, {self.before:.3g} s without it"


def forecast(
    present: Sequence[Worker],
    new: Worker,
    batch: tuple[int, int],
    exchange: GradientSync,
    lines: tuple[LinkCost, LinkCost],
) -> Forecast:
    """What a step takes without `new` and with it.

    Args:
        present: what samples cost those who are there.
        new: and the newcomer.
        batch: samples of a micro-batch, and micro-batches of a step.
        exchange: of the run; its ring is that of those who are there.
        lines: to the master, the slowest of theirs and the newcomer's.
    """
    theirs, own = lines
    alpha, beta = (max(0.0, mine - usual) for mine, usual in ((own.alpha, theirs.alpha), (own.beta, theirs.beta)))
    ring = LinkCost(exchange.alpha, exchange.beta)
    slower = LinkCost(exchange.alpha + alpha, exchange.beta + beta)
    after = _step_seconds((*present, new), batch, exchange, slower)
    return Forecast(
        before=_step_seconds(present, batch, exchange, ring), after=after + batch[1] * exchange.statistics * alpha
    )


def _step_seconds(workers: Sequence[Worker], batch: tuple[int, int], exchange: GradientSync, ring: LinkCost) -> float:
    samples, micro_batches = batch
    computing = micro_batches * finish_seconds(apportion(samples, workers), workers)
    last, whole = (
        all_reduce_seconds(nbytes, len(workers), ring.alpha, ring.beta)
        for nbytes in (min(exchange.gradient_bytes, exchange.bucket_bytes), exchange.gradient_bytes)
    )
    return max(computing + last, whole)
