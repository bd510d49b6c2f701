"""Decides on a division of the model itself: which ranks hold it together, and how much of it each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.benchmark.exchange import measure_all_reduce, measure_message
from evener.cluster import Seat
from evener.comm import Group
from evener.errors import require
from evener.journey.order import Order
from evener.journey.prepare import Work, example
from evener.journey.speeds import measured_timings, relative_shares, worker_of
from evener.journey.strategy import division_of, is_pipeline, replica_rows
from evener.oracle import Candidate, Worker
from evener.oracle.divided import Rows, Talk, plan_divided, samples_of_replicas
from evener.oracle.strategies import Arrangement, Replica, plan_replica, plan_replicas
from evener.oracle.traffic import step_traffic
from evener.parallel import DividedModel, Reader
from evener.plan import Plan

PIPELINE_DEPTH = 4
"""Micro-batches a stage: bubbles then take a fifth of a step at most (Huang et al., 2019, section 2.3)."""


LEAST_SAMPLES = 2
"""Of a micro-batch, unless the user wants fewer: of a single one BatchNorm makes no statistics."""


def decide_division(
    work: Work, world: Group, seat: Seat, order: Order, workers: Sequence[Worker] | None = None
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
    talk = None if is_pipeline(order.strategy) else _talk(work, world, order, rows, speeds, micro)
    return plan_divided(
        order.strategy,  # type: ignore[arg-type]  # is checked
        [Candidate(node=n.name, device=n.device, worker=w) for n, w in zip(seat.nodes, workers, strict=True)],
        rows,
        speeds,
        work.settings.batch_size,
        accumulate=accumulate,
        talk=talk,
    )


def _micro_batches(order: Order, rows: Rows, batch_size: int) -> int:
    if not is_pipeline(order.strategy):
        return order.accumulate
    if order.micro_batches is not None:
        allowed = f"at most {batch_size // len(rows)}: a sample for every replica in each"
        require(order.micro_batches * len(rows) <= batch_size, "--micro-batches", order.micro_batches, allowed)
        return order.micro_batches
    return max(1, min(PIPELINE_DEPTH * max(map(len, rows)), batch_size // (LEAST_SAMPLES * len(rows))))


def _talk(work: Work, world: Group, order: Order, rows: Rows, speeds: Sequence[float], micro: int) -> Talk:
    """What the ranks will tell each other, by the oracle's table, over the links as they are."""
    samples = samples_of_replicas(rows, speeds, micro)
    arrangement = Arrangement(
        division=division_of(order.strategy),
        replicas=tuple(Replica(shares=tuple(speeds[rank] for rank in row)) for row in rows),
    )
    reader = Reader(work.model)
    inputs = DividedModel.tensors(example(work, micro))
    shaped = [[torch.empty((n, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs] for n in samples]
    networks = [reader.read(one).network for one in shaped]
    plans = [
        plan_replica(network, arrangement.division, replica, before=plan)
        for network, replica, plan in zip(
            networks, arrangement.replicas, plan_replicas(networks[0], arrangement), strict=True
        )
    ]
    traffic = step_traffic(plans, arrangement, next(work.model.parameters()).element_size())
    alpha, beta = measure_all_reduce(world, 2**20)
    return Talk(
        sent=[{kind: sent for kind, (sent, _) in row.items()} for row in traffic],
        exchanges=max(plan.exchanges for plan in plans),
        alpha=alpha,
        beta=beta,
        message_seconds=measure_message(world),
    )
