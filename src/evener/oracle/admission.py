"""Predicts whether a joining node shortens the steps of a data-parallel run. Pure.

    a step = the slowest node's computing + the ring of the last gradients     or the ring of all gradients, if longer

The ring cost of the present nodes is measured. The link of the joining node to the master, compared with the slowest
present link, says how much slower its ring is; the message overhead beyond the link is the same for all nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.oracle.apportion import NodeCost, apportion, finish_seconds
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.oracle.data_parallel import GradientSync


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of a step without and with a joining node."""

    before: float
    after: float

    @property
    def is_shorter(self) -> bool:
        """Whether the node shortens the step."""
        return self.after < self.before

    @property
    def summary(self) -> str:
        """The prediction as a phrase for the user."""
        return f"{self.after:.3g} s per step with it, {self.before:.3g} s without it"


def forecast(
    present: Sequence[NodeCost],
    joining: NodeCost,
    batch: tuple[int, int],
    exchange: GradientSync,
    links: tuple[LinkCost, LinkCost],
) -> Forecast:
    """Return the predicted seconds of a step without and with the node `joining`.

    Args:
        present: cost of samples on each present node.
        joining: cost of samples on the joining node.
        batch: samples of a micro-batch, and micro-batches of a step.
        exchange: what a step exchanges, with the ring cost of the present nodes.
        links: cost of the slowest present link to the master, and of the joining node's.
    """
    slowest, new = links
    alpha, beta = max(0.0, new.alpha - slowest.alpha), max(0.0, new.beta - slowest.beta)
    ring = LinkCost(exchange.alpha, exchange.beta)
    slower = LinkCost(exchange.alpha + alpha, exchange.beta + beta)
    after = _step_seconds((*present, joining), batch, exchange, slower)
    return Forecast(
        before=_step_seconds(present, batch, exchange, ring), after=after + batch[1] * exchange.statistics * alpha
    )


def _step_seconds(workers: Sequence[NodeCost], batch: tuple[int, int], exchange: GradientSync, ring: LinkCost) -> float:
    samples, micro_batches = batch
    computing = micro_batches * finish_seconds(apportion(samples, workers), workers)
    last_bucket, all_gradients = (
        all_reduce_seconds(nbytes, len(workers), ring.alpha, ring.beta)
        for nbytes in (min(exchange.gradient_bytes, exchange.bucket_bytes), exchange.gradient_bytes)
    )
    return max(computing + last_bucket, all_gradients)
