"""Decides on a division of the model itself: which ranks hold it together, and how much of it each."""

from __future__ import annotations

from collections.abc import Sequence

from evener.comm.group import Group
from evener.errors import require
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker
from evener.oracle.data_parallel import Candidate, Rows, plan_divided
from evener.plan import Plan
from evener.run.order import Order
from evener.run.prepare import Work
from evener.run.rehearse import rehearsed
from evener.run.speeds import measured_timings, relative_shares, worker_of
from evener.run.strategy import is_pipeline, replica_rows

PIPELINE_DEPTH = 4
"""Micro-batches a stage: bubbles then take a fifth of a step at most (Huang et al., 2019, section 2.3)."""


LEAST_SAMPLES = 2
"""Of a micro-batch, unless the user wants fewer: of a single one BatchNorm makes no statistics."""


def decide_division(
    work: Work, world: Group, seat: RankEnvironment, order: Order, workers: Sequence[Worker] | None = None
) -> Plan:
    """The plan of a run that divides filters, channels, rows or layers; the same on every rank.

    Args:
        work: what is to be trained.
        world: all ranks.
        seat: of this rank.
        order: what was asked for.
        workers: what a micro-batch costs every node, if it was measured already.

    Raises:
        InvalidInput: the model cannot be divided so.
        InvalidValue: there are not enough nodes or samples.
    """
    rows = replica_rows(order.strategy, order.replicas, world.size)
    accumulate = _micro_batches(order, rows, work.settings.batch_size)
    micro = -(-work.settings.batch_size // accumulate)
    shares = relative_shares(order.shares, world.size)
    if order.strategy == "pipeline":  # which measures its parts on every node by itself
        workers = [Worker(unit_seconds=1.0)] * world.size
    if workers is None:
        workers = [worker_of(one, work.settings.accumulate) for one in measured_timings(work, world, seat, micro)]
    speeds = shares or [1 / worker.seconds(micro) for worker in workers]
    plan = plan_divided(
        order.strategy,  # type: ignore[arg-type]  # is checked
        [Candidate(node=n.name, device=n.device, worker=w) for n, w in zip(seat.nodes, workers, strict=True)],
        rows,
        speeds,
        work.settings.batch_size,
        accumulate=accumulate,
    )
    return plan if is_pipeline(order.strategy) else rehearsed(work, plan, world, seat, order)


def _micro_batches(order: Order, rows: Rows, batch_size: int) -> int:
    if not is_pipeline(order.strategy):
        return order.accumulate
    if order.micro_batches is not None:
        allowed = f"at most {batch_size // len(rows)}: a sample for every replica in each"
        require(order.micro_batches * len(rows) <= batch_size, "--micro-batches", order.micro_batches, allowed)
        return order.micro_batches
    lengths = [len(row) for row in rows]
    least = LEAST_SAMPLES * sum(lengths) // min(lengths)  # so that the smallest replica has as many
    return max(1, min(PIPELINE_DEPTH * max(lengths), batch_size // least))
