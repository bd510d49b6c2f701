"""From what is asked for, and what was measured, to the plan; every rank comes to the same one.

candidates    strategies that go with what is asked for            nothing is measured
measure       what the whole model costs every node, and the ring  all ranks together
price         what a step of every candidate would take            by the oracle
choose        the first one, unless another is much faster         pure
divide        who does how much                                    pure
predict       what a step of the plan will take                    all ranks together
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from evener.errors import DoesNotFit, InvalidInput, TrainingFailed
from evener.launch.nodes import LocalNode
from evener.oracle.apportion import Worker
from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel, plan_divided
from evener.oracle.search import search
from evener.plan import Plan
from evener.profile import ClusterProfile, DeviceProfile, Fabric
from evener.run.config import is_pipeline
from evener.run.context import RankContext
from evener.run.costs import (
    MeasuredCosts,
    calibrate_pace,
    gradient_sync,
    measure_costs,
    measure_ring,
    node_memories,
)
from evener.run.predict import predict_plan
from evener.run.strategies import Shape, candidate_strategies, shape_of
from evener.tracer.model_graph import trace_model_graph

MUCH = 1.25
"""A model is divided if that is predicted to be so many times as fast: data parallelism is the better known."""
_UNTIMED = Worker(unit_seconds=1.0)
"""A node of which nothing was measured: all are taken to be equally fast, and the plan names no seconds."""

Ring = tuple[float, float]
"""(alpha [s], beta [s/byte]) of the ring of all ranks."""


def make_plan(context: RankContext) -> Plan:
    """The plan that the user gave, or the best one of those that go with what is asked for; the same on every rank.

    Raises:
        InvalidInput: the model, or a batch, cannot be divided among these nodes as it is asked for.
        DoesNotFit: a node cannot hold its part.
    """
    config, nodes = context.config, context.env.nodes
    if context.planned is not None:
        return fit_plan(context.planned, context.env.names)
    names = candidate_strategies(config, len(nodes))
    shape = shape_of(config, names[0], len(nodes), context.batch_size)
    if _is_alone(context, shape):
        return divide(shape, nodes, (), context.batch_size, GradientSync(gradient_bytes=0))
    costs = MeasuredCosts() if shape.strategy == "pipeline" else measure_costs(context, shape.samples)
    ring = measure_ring(context) if shape.strategy == "data" and costs.workers else (0.0, 0.0)
    chosen = choose(names, costs.misfit, price(context, names, costs, ring))
    if chosen != shape.strategy:
        shape = shape_of(config, chosen, len(nodes), context.batch_size)
    if chosen == "data":
        return _finish_data_plan(context, shape, costs, ring)
    plan = divide(shape, nodes, costs.workers, context.batch_size)
    return plan if is_pipeline(chosen) else predict_plan(context, plan)


def fit_plan(plan: Plan, names: Sequence[str]) -> Plan:
    """`plan` with its ranks in the order of the nodes `names`, some of which they are.

    Raises:
        InvalidInput: a node is missing, or ranks of one replica are not neighbours in that order.
    """
    missing = [a.node for a in plan.assignments if a.node not in names]
    if missing:
        raise InvalidInput(f"the plan is for node {missing[0]}, which is not here: there are {', '.join(names)}")
    ordered = sorted(plan.assignments, key=lambda a: names.index(a.node))
    fitted = msgspec.structs.replace(
        plan, assignments=tuple(msgspec.structs.replace(a, rank=rank) for rank, a in enumerate(ordered))
    )
    ranks = [rank for row in fitted.replica_ranks for rank in row]
    if not is_pipeline(plan.strategy) and ranks != sorted(ranks):
        wanted = ", ".join(a.node for a in plan.assignments)
        raise InvalidInput(f"nodes of one replica have to be neighbours; start the nodes in the order {wanted}")
    return fitted


def _is_alone(context: RankContext, shape: Shape) -> bool:
    """Whether there is nothing to decide: one node without a bound on its memory."""
    env = context.env
    is_free = env.node.memory_bytes is None and env.device.type == "cpu"
    return shape.strategy == "data" and len(env.nodes) == 1 and is_free


def _finish_data_plan(context: RankContext, shape: Shape, costs: MeasuredCosts, ring: Ring) -> Plan:
    """The plan of data parallelism, with what its step will take."""
    calibrate_pace(context, shape.samples)
    exchange = gradient_sync(context, ring)
    plan = divide(shape, context.env.nodes, costs.workers, context.batch_size, exchange)
    return plan if context.group.size == 1 else predict_plan(context, plan)


def choose(names: Sequence[str], misfit: str, estimates: Sequence[CostEstimate]) -> str:
    """One of the strategies `names`: the first, unless it does not fit or another is much faster.

    Args:
        names: candidates; of several, the first is `data`.
        misfit: why a node cannot hold the whole model; empty if all can.
        estimates: of those that fit, fastest first.

    Raises:
        DoesNotFit: the first does not fit, and the layers may not be divided among the nodes.
    """
    if misfit:
        if "pipeline" not in names:
            raise DoesNotFit(misfit)
        return "pipeline"
    divided = next((estimate for estimate in estimates if estimate.strategy in names[1:]), None)
    whole = next((q for q in estimates if q.strategy not in names[1:] and q.accumulate == 1), None)  # fits as it is
    if divided is None or (whole is not None and whole.step_seconds <= MUCH * divided.step_seconds):
        return names[0]
    return divided.strategy


def price(context: RankContext, names: Sequence[str], costs: MeasuredCosts, ring: Ring) -> Sequence[CostEstimate]:
    """What a step of each candidate would take that fits, fastest first; empty if there is nothing to choose from."""
    if len(names) == 1 or costs.misfit:
        return ()
    memories = node_memories(context)
    try:
        graph = trace_model_graph(context.model, context.samples(2)[0], costs.timings[0].task)
        job = TrainingJob(
            graph=graph,
            batch_size=-(-context.batch_size // context.config.accumulate),
            optimizer=_optimizer_name(context),
            precision=context.config.precision,
            task=costs.timings[0].task,
        )
        profile = _profile(context.env.nodes, costs, memories, ring)
        return search(CostModel(job, profile), ("serial", *names)).ranked  # type: ignore[arg-type]  # are checked
    except (TrainingFailed, DoesNotFit):  # there is no graph of the model, or the oracle knows no way: no prices
        return ()


def divide(
    shape: Shape,
    nodes: Sequence[LocalNode],
    workers: Sequence[Worker],
    batch_size: int,
    exchange: GradientSync | None = None,
) -> Plan:
    """Who does how much.

    Args:
        shape: who holds a model together, in how many micro-batches.
        nodes: one a rank.
        workers: what a micro-batch costs each; empty if nothing was measured. A pipeline measures its parts by itself.
        batch_size: samples of a step.
        exchange: what whole models exchange; None where models are divided.

    Raises:
        InvalidValue: there is not a sample for every replica, or a replica has no speed.
    """
    is_timed = bool(workers) and shape.strategy != "pipeline"
    costs = workers if is_timed else [_UNTIMED] * len(nodes)
    ranks = [Candidate(node=n.name, device=n.device, worker=w) for n, w in zip(nodes, costs, strict=True)]
    if exchange is not None:
        plan = plan_data_parallel(ranks, batch_size, exchange, accumulate=shape.micro_batches, shares=shape.shares)
    else:
        plan = plan_divided(
            shape.strategy,  # type: ignore[arg-type]  # is checked
            ranks,
            shape.rows,
            shape.shares or [1 / worker.seconds(shape.samples) for worker in costs],
            batch_size,
            accumulate=shape.micro_batches,
        )
    if is_timed:
        return plan
    untimed = tuple(msgspec.structs.replace(a, sample_seconds=0.0) for a in plan.assignments)
    return msgspec.structs.replace(plan, prediction=None, assignments=untimed)


def _optimizer_name(context: RankContext) -> str:
    """What it keeps for every parameter, by the name that the oracle knows."""
    made = context.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    if isinstance(made, torch.optim.SGD):
        return "momentum" if made.defaults["momentum"] else "sgd"
    return "adam"


def _profile(nodes: Sequence[LocalNode], costs: MeasuredCosts, memories: Sequence[int], ring: Ring) -> ClusterProfile:
    """The nodes as this run has measured them."""
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(
                node=node.name,
                device=node.device,
                model="",
                cores=1,
                memory_bytes=memory,
                usable_memory_bytes=memory,
                timings=(timing,),
            )
            for node, timing, memory in zip(nodes, costs.timings, memories, strict=True)
        ),
        fabrics=(Fabric(name="measured", within="cluster", alpha=ring[0], beta=ring[1]),),
    )
