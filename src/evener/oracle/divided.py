"""Plans of strategies in which several ranks hold one model together: who is in which replica, with how much of it."""

from __future__ import annotations

from collections.abc import Sequence

from evener.errors import require
from evener.oracle.apportion import Worker, apportion
from evener.oracle.data_parallel import Candidate
from evener.plan import Assignment, Plan, Strategy

Rows = Sequence[Sequence[int]]
"""The ranks of every replica."""


def samples_of_replicas(rows: Rows, speeds: Sequence[float], samples: int) -> tuple[int, ...]:
    """How many of `samples` each replica takes: one is as fast as its ranks together.

    Args:
        rows: of every replica, its ranks.
        speeds: of the ranks, in any unit.
        samples: of a micro-batch.

    Raises:
        InvalidValue: there are fewer samples than replicas, or a replica whose ranks have no speed.
    """
    require(samples >= len(rows), "--batch-size", samples, f"at least the {len(rows)} replicas, for every micro-batch")
    together = [sum(speeds[rank] for rank in row) for row in rows]
    require(min(together) > 0, "--shares", list(speeds), "positive for a node of every replica")
    return apportion(samples, [Worker(unit_seconds=1 / speed) for speed in together])


def plan_divided(
    strategy: Strategy,
    candidates: Sequence[Candidate],
    rows: Rows,
    speeds: Sequence[float],
    batch_size: int,
    *,
    accumulate: int = 1,
) -> Plan:
    """The plan of `strategy`, in which ranks of a replica have shares of its work in proportion to their speeds.

    Args:
        strategy: with filters, channels, rows or layers divided.
        candidates: all ranks.
        rows: of every replica, its ranks.
        speeds: relative, one a rank.
        batch_size: samples of a step over all replicas.
        accumulate: micro-batches of a step.

    Raises:
        InvalidValue: there is not a sample for every replica, or a replica has no speed.
    """
    sizes = samples_of_replicas(rows, speeds, -(-batch_size // accumulate))
    assignments = []
    for index, (row, samples) in enumerate(zip(rows, sizes, strict=True)):
        together = sum(speeds[rank] for rank in row)
        for rank in row:
            one, share = candidates[rank], speeds[rank] / together
            assignments.append(
                Assignment(
                    rank=rank,
                    node=one.node,
                    device=one.device,
                    samples=samples,
                    fixed_seconds=one.worker.fixed_seconds,
                    sample_seconds=one.worker.unit_seconds,
                    reason=f"{share:.0%} of the speed of its replica",
                    replica=index,
                    share=share,
                )
            )
    return Plan(strategy=strategy, batch_size=batch_size, accumulate=accumulate, assignments=tuple(assignments))
