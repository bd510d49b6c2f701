"""From the user's words and what was measured to the plan; every rank comes to the same one."""

from __future__ import annotations

import msgspec

from evener.benchmark.exchanges import measure_all_reduce, measure_small_exchange
from evener.comm.group import Group
from evener.errors import DoesNotFit, require
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.parallel.batch_norm import statistics_exchanges
from evener.plan import Plan
from evener.run.choose import alternatives, better_strategy
from evener.run.divide import decide_division
from evener.run.given import fit_plan
from evener.run.order import Order
from evener.run.prepare import Work, calibrate
from evener.run.rehearse import rehearsed
from evener.run.speeds import measured_timings, relative_shares, worker_of


def decide(work: Work, world: Group, seat: RankEnvironment, order: Order) -> Plan:
    """The plan: the one that was given, or one of the strategy that was asked for, or of the best one."""
    if order.plan is not None:
        return fit_plan(order.plan, seat.names)
    if order.strategy in ("auto", "data"):
        return _decide_data(work, world, seat, order)
    return decide_division(work, world, seat, order)


def _decide_data(work: Work, world: Group, seat: RankEnvironment, order: Order) -> Plan:
    """Data parallelism, by measured speeds or by the shares that the user named; with `auto` something better."""
    settings = work.settings
    micro = -(-settings.batch_size // settings.accumulate)
    shares = relative_shares(order.shares, world.size)
    require(settings.batch_size >= world.size, "--batch-size", settings.batch_size, f"at least the {world.size} nodes")
    if world.size == 1 and seat.node.memory_bytes is None and seat.device.type == "cpu":
        worker = Worker(unit_seconds=1.0)
        lone = [Candidate(node=seat.node.name, device=seat.node.device, worker=worker)]
        return msgspec.structs.replace(
            plan_data_parallel(
                lone, settings.batch_size, GradientSync(gradient_bytes=0), accumulate=settings.accumulate
            ),
            prediction=None,
        )
    try:
        timings = measured_timings(work, world, seat, micro)
    except DoesNotFit:
        if world.size == 1 or "pipeline" not in alternatives(order):
            raise
        return decide_division(work, world, seat, msgspec.structs.replace(order, strategy="pipeline"))
    calibrate(work, world, seat, micro)
    workers = [worker_of(timing, settings.accumulate) for timing in timings]
    gradient_bytes = sum(p.nbytes for p in work.model.parameters() if p.requires_grad)
    alpha, beta = measure_all_reduce(world, gradient_bytes)
    if world.size > 1:
        strategy = better_strategy(work, world, seat, order, timings, (alpha, beta))
        if strategy != "data":
            world.timer.pace.reference = None  # which is of steps with the whole model
            return decide_division(work, world, seat, msgspec.structs.replace(order, strategy=strategy), workers)
    statistics, statistics_bytes = statistics_exchanges(work.model)
    exchange = GradientSync(
        gradient_bytes=gradient_bytes,
        statistics=statistics * settings.accumulate,
        statistics_bytes=statistics_bytes * settings.accumulate,
        message_seconds=measure_small_exchange(world),
        alpha=alpha,
        beta=beta,
    )
    candidates = [
        Candidate(node=node.name, device=node.device, worker=worker)
        for node, worker in zip(seat.nodes, workers, strict=True)
    ]
    plan = plan_data_parallel(candidates, settings.batch_size, exchange, accumulate=settings.accumulate, shares=shares)
    return rehearsed(work, plan, world, seat, order) if world.size > 1 else plan
