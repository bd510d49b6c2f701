"""From measured speeds, or the shares that the user named, to the plan; every rank comes to the same one."""

from __future__ import annotations

import msgspec

from evener.benchmark import affine
from evener.benchmark.exchange import measure_all_reduce, measure_message
from evener.cluster import Seat
from evener.comm import Group
from evener.errors import InvalidValue, require
from evener.journey.order import Order
from evener.journey.prepare import Work, calibrate, measure
from evener.oracle import Candidate, Exchange, Worker, plan_data_parallel
from evener.parallel import statistics_exchanges
from evener.plan import Plan
from evener.profile import TaskTiming


def decide(work: Work, world: Group, seat: Seat, order: Order) -> Plan:
    """The plan: from measured speeds, or from the shares that the user named."""
    settings = work.settings
    micro = -(-settings.batch_size // settings.accumulate)
    weights = _weights(order.shares, world.size)
    require(settings.batch_size >= world.size, "--batch-size", settings.batch_size, f"at least the {world.size} nodes")
    if world.size == 1 and seat.node.memory_bytes is None and seat.device.type == "cpu":
        worker = Worker(unit_seconds=1.0)
        lone = [Candidate(node=seat.node.name, device=seat.node.device, worker=worker)]
        return msgspec.structs.replace(
            plan_data_parallel(lone, settings.batch_size, Exchange(gradient_bytes=0), accumulate=settings.accumulate),
            prediction=None,
        )
    calibrate(work, world, seat, micro)
    timing = measure(work, world, seat, micro)
    timings = [msgspec.json.decode(row, type=TaskTiming) for row in world.all_gather_bytes(msgspec.json.encode(timing))]
    gradient_bytes = sum(p.nbytes for p in work.model.parameters() if p.requires_grad)
    alpha, beta = measure_all_reduce(world, gradient_bytes)
    statistics, statistics_bytes = statistics_exchanges(work.model)
    exchange = Exchange(
        gradient_bytes=gradient_bytes,
        statistics=statistics * settings.accumulate,
        statistics_bytes=statistics_bytes * settings.accumulate,
        message_seconds=measure_message(world),
        alpha=alpha,
        beta=beta,
    )
    candidates = [
        Candidate(node=node.name, device=node.device, worker=_worker(t, settings.accumulate))
        for node, t in zip(seat.nodes, timings, strict=True)
    ]
    return plan_data_parallel(candidates, settings.batch_size, exchange, accumulate=settings.accumulate, shares=weights)


def _worker(timing: TaskTiming, accumulate: int) -> Worker:
    """What a micro-batch costs: the update, which a step makes once, counts to each of its micro-batches in part."""
    fixed, each = affine(timing)
    fixed -= timing.update_seconds * (1 - 1 / accumulate)
    return Worker(unit_seconds=max(each, 1e-9), fixed_seconds=max(fixed, 0.0), most=timing.max_samples)


def _weights(shares: str, size: int) -> list[float] | None:
    """Relative shares that the user named; None for measured ones. Raises InvalidValue."""
    if shares == "measured":
        return None
    if shares == "equal":
        return [1.0] * size
    try:
        weights = [float(text) for text in shares.split(",")]
    except ValueError:
        raise InvalidValue("--shares", shares, "measured, equal, or numbers such as 7,2,1") from None
    ok = len(weights) == size and min(weights) >= 0 and sum(weights) > 0
    require(ok, "--shares", shares, f"measured, equal, or {size} numbers of zero or more, one a node")
    return weights
