"""The ways in which every recipe is divided: strategies with uneven shares, with an empty one, and hybrids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evener.oracle.apportion import apportion, weights_to_workers
from evener.oracle.schedule import Rematerialise
from evener.records.plan import Assignment, Plan, Prediction, Strategy

Shares = tuple[float, ...]
BATCH = 10


@dataclass(frozen=True, kw_only=True)
class Way:
    """A division of a step.

    Attributes:
        strategy: by name.
        shares: of the ranks of every replica in its work; of data parallelism, of the samples.
        samples: shares of the replicas in the samples; empty for a single replica, and for data parallelism.
        rematerialise: what is computed twice.
    """

    strategy: Strategy
    shares: tuple[Shares, ...]
    samples: Shares = ()
    rematerialise: Rematerialise = "auto"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.shares))

    def plan(self, micro_batches: int) -> Plan:
        """What the run is to perform; a pipeline in so many micro-batches."""
        micro_batches = micro_batches if self.strategy.endswith("pipeline") else 1
        rows: list[dict[str, Any]]
        if self.strategy == "data":
            rows = [{"samples": own} for own in _sizes(self.shares[0], BATCH)]
        else:
            own = _sizes(self.samples or (1.0,), -(-BATCH // micro_batches))
            rows = [
                {"samples": own[replica], "replica": replica, "share": share / sum(shares), "stage": stage}
                for replica, shares in enumerate(self.shares)
                for stage, share in enumerate(shares)
            ]
        return Plan(
            strategy=self.strategy,
            batch_size=BATCH,
            accumulate=micro_batches,
            assignments=tuple(
                Assignment(rank=rank, node=f"node-{rank}", device="cpu", **row) for rank, row in enumerate(rows)
            ),
            prediction=Prediction(step_seconds=1, compute_seconds=1, communication_seconds=0, sent_bytes=0),
        )


def _sizes(shares: Shares, count: int) -> tuple[int, ...]:
    return apportion(count, weights_to_workers(shares, [None] * len(shares)))


WAYS = {
    "data 7,2,1": Way(strategy="data", shares=((7, 2, 1),)),
    "data 5,0,3": Way(strategy="data", shares=((5, 0, 3),)),
    "filter 7,2,1": Way(strategy="filter", shares=((7, 2, 1),)),
    "channel 5,0,3": Way(strategy="channel", shares=((5, 0, 3),)),
    "sharded 7,2,1": Way(strategy="sharded", shares=((7, 2, 1),)),
    "sharded 5,0,3": Way(strategy="sharded", shares=((5, 0, 3),)),
    "spatial 7,2,1": Way(strategy="spatial", shares=((7, 2, 1),)),
    "spatial 5,0,3": Way(strategy="spatial", shares=((5, 0, 3),)),
    "pipeline 1,1": Way(strategy="pipeline", shares=((1, 1),)),
    "spatial again": Way(strategy="spatial", shares=((7, 2, 1),), rematerialise="always"),
    "pipeline again": Way(strategy="pipeline", shares=((1, 1),), rematerialise="always"),
    "data+sharded": Way(strategy="data+sharded", shares=((3, 1), (1, 2)), samples=(7, 3)),
    "data+spatial": Way(strategy="data+spatial", shares=((3, 2), (1, 0)), samples=(4, 6)),
}
SAMPLES_ONLY = ("data", "pipeline")
"""Strategies under which masks are documented to differ with the division."""
