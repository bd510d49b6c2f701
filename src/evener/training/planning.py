"""The plan of a run, from its options and measurements; every rank computes the same one.

candidates    strategies that the options allow                    nothing is measured
measure       the whole model on every node, and the ring          all ranks together
price         the step time of every candidate                     by the oracle
choose        the first one, unless another is much faster         pure
divide        the share of every node                              pure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch import nn

from evener.benchmark.exchanges import Sums
from evener.config.conflicts import strategy_conflict
from evener.config.run_config import STRATEGIES, RunConfig
from evener.launch.nodes import NodeSpec, relative_shares
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.model import CostEstimate
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel, plan_divided, with_lines
from evener.parallel.norms import has_batch_norm
from evener.records.errors import DoesNotFit, InvalidInput, InvalidValue, require
from evener.records.plan import Plan, Rejected, is_of_teams, is_pipeline
from evener.training.context import RankContext
from evener.training.costs import (
    MeasuredCosts,
    calibrate_pace,
    gradient_sync,
    measure_costs,
    measure_sums_of,
    node_memories,
    price,
)
from evener.training.image_grid import in_columns

MIN_GAIN = 1.25
"""A model is divided if that is predicted to be this many times as fast as data parallelism."""
_UNTIMED = NodeCost(unit_seconds=1.0)
"""An unmeasured node: all are assumed to be equally fast, and the plan has no seconds."""
PIPELINE_DEPTH = 4
"""Micro-batches a stage: bubbles then take a fifth of a step at most (Huang et al., 2019, section 2.3)."""
MIN_SAMPLES = 2
"""Of a micro-batch, unless the user wants fewer: BatchNorm has no statistics of a single sample."""

Rows = tuple[tuple[int, ...], ...]


class Shape(NamedTuple):
    """How a strategy divides a step among ranks, before it is known how fast they are.

    Attributes:
        strategy: by name.
        rows: the ranks of every replica.
        micro_batches: of a step, one after the other.
        samples: of the largest of them, over all replicas.
        shares: of the ranks, relative; None to go by their speeds.
    """

    strategy: str
    rows: Rows
    micro_batches: int
    samples: int
    shares: list[float] | None


def make_plan(context: RankContext, config: RunConfig, refused: Sequence[Rejected] = ()) -> Plan:
    """Return the user's plan, or the best one that the options allow; the same on every rank.

    Args:
        context: of this rank.
        config: of the run.
        refused: strategies, by name, that are excluded.

    Raises:
        InvalidInput: the model, or a batch, cannot be divided among these nodes as requested.
        DoesNotFit: a node cannot hold its part.
    """
    if context.user_plan is not None:
        return fit_plan(context.user_plan, context.env.names)
    nodes, batch_size, accumulate = context.env.nodes, context.batch_size, config.accumulate
    out = [one.what for one in refused]
    names = [name for name in candidate_strategies(config, len(nodes)) if name not in out]
    shape = shape_of(config, names[0], len(nodes), batch_size)
    if _is_alone(context.env, shape):
        return divide(shape, nodes, (), batch_size, GradientSync(gradient_bytes=0))
    context.begins("measuring", f"{len(nodes)} nodes and what joins them")
    is_alone = shape.strategy.startswith("pipeline")  # one pipeline measures its parts by itself
    costs = MeasuredCosts() if is_alone else measure_costs(context, shape.samples, accumulate)
    is_summed = (shape.strategy == "data" or len(names) > 1) and costs.workers
    sums = measure_sums_of(context.env, context.group, context.model) if is_summed else Sums()
    if costs.misfits and costs.workers and (plan := _plan_without_misfits(context, config, names, costs, sums)):
        return msgspec.structs.replace(plan, rejected=(*refused, *plan.rejected))
    misfit = next((f"node {nodes[rank].name}: {why}" for rank, why in costs.misfits.items()), "")
    if not misfit:
        names = those_of_one_process(names, context.model)
    estimates = price(context, names, costs, sums, accumulate, config.schedule)
    chosen = choose(names, misfit, estimates)
    refused = (*refused, *why_divided(names, chosen, misfit, estimates))
    if chosen != shape.strategy:
        shape = shape_of(config, chosen, len(nodes), batch_size)
    plan = _divided(context, shape, nodes, costs, sums)
    if config.columns > 1:
        plan = in_columns(plan, config.columns)
    if is_of_teams(chosen):
        plan = msgspec.structs.replace(plan, members=config.members)
    return msgspec.structs.replace(plan, rejected=(*refused, *plan.rejected))


def _divided(context: RankContext, shape: Shape, nodes: Sequence[NodeSpec], costs: MeasuredCosts, sums: Sums) -> Plan:
    """Divide the work among `nodes`, after further measurements if needed; all ranks call this."""
    exchange = None
    if shape.strategy == "data":
        calibrate_pace(context, shape.samples, shape.micro_batches)
        exchange = gradient_sync(context.group, context.model, sums, shape.micro_batches)
    plan = divide(shape, nodes, costs.workers, context.batch_size, exchange)
    if exchange is None or not costs.workers:
        return plan
    return msgspec.structs.replace(with_lines(plan, exchange, sums.line_rates), ring=sums.ring)


def _plan_without_misfits(
    context: RankContext, config: RunConfig, names: Sequence[str], costs: MeasuredCosts, sums: Sums
) -> Plan | None:
    """Return the plan of only the nodes that hold the model; None if the others are needed. All ranks call this.

    Raises:
        DoesNotFit: the others are needed, and layers may not be divided among the nodes.
    """
    strategy, rows = names[0], config.replicas or config.columns > 1
    if strategy.startswith("data+") or rows or is_of_teams(strategy):
        return None  # the user said which nodes hold a model together
    holding = [rank for rank in range(len(context.env.nodes)) if rank not in costs.misfits]
    shares = relative_shares(config.shares, len(context.env.nodes))
    measured = msgspec.structs.replace(config, shares="measured")
    shape = shape_of(measured, "data" if len(holding) == 1 else strategy, len(holding), context.batch_size)
    if shares is not None and any(shares[rank] for rank in holding):
        shape = shape._replace(shares=[shares[rank] for rank in holding])
    try:
        plan = _divided(context, shape, [context.env.nodes[rank] for rank in holding], costs, sums)
    except DoesNotFit:
        if "pipeline" in names:
            return None
        raise
    out = (Rejected(what=context.env.nodes[rank].name, reason=why, is_node=True) for rank, why in costs.misfits.items())
    return msgspec.structs.replace(plan, rejected=(*out, *plan.rejected))


def plan_without_smallest(context: RankContext, config: RunConfig, plan: Plan, why: str) -> Plan | None:
    """Return `plan` of a pipeline without the node of the least memory, as its stages do not fit.

    All ranks call this.

    Returns:
        None if the user decided on the nodes, or none would remain.
    """
    memories = dict(zip(context.env.names, node_memories(context), strict=True))
    if plan.strategy != "pipeline" or len(plan.assignments) < 2 or context.user_plan is not None:
        return None
    smallest = min((one.node for one in plan.assignments), key=memories.__getitem__)
    if memories[smallest] == max(memories[one.node] for one in plan.assignments):
        return None  # all are alike
    names = [one.node for one in plan.assignments if one.node != smallest]
    nodes = [node for node in context.env.nodes if node.name in names]
    shape = shape_of(config, plan.strategy, len(nodes), context.batch_size)  # a pipeline takes no --shares
    fewer = divide(shape, nodes, (), context.batch_size)
    out = Rejected(what=smallest, reason=f"{why} with this node, which has the least", is_node=True)
    return msgspec.structs.replace(fewer, rejected=(*plan.rejected, out))


def fit_plan(plan: Plan, names: Sequence[str]) -> Plan:
    """Return `plan` with its ranks in the order of the nodes `names`, which include its nodes.

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


def why_all_take_part(plan: Plan, reasons: Mapping[str, bool]) -> Plan:
    """Return `plan` with the reason why all of its nodes take part, if one of them alone would be faster.

    Args:
        plan: that was made.
        reasons: possible reasons, as the end of a sentence, and whether each applies.
    """
    before = plan.prediction
    if before is None or before.alone_seconds is None or before.alone_seconds >= before.step_seconds:
        return plan
    usual = "the difference is smaller than the error of measurement"
    reason = next((text for text, holds in reasons.items() if holds), usual)
    return msgspec.structs.replace(plan, advice=f"All nodes take part because {reason}.")


def _is_alone(env: RankEnvironment, shape: Shape) -> bool:
    """Return whether there is nothing to decide: one node without a bound on its memory."""
    is_free = env.node.memory_bytes is None and env.device.type == "cpu"
    return shape.strategy == "data" and len(env.nodes) == 1 and is_free


def shape_of(config: RunConfig, strategy: str, size: int, batch_size: int) -> Shape:
    """Return how `strategy` divides steps among `size` ranks. Raise InvalidValue if it cannot."""
    shares = relative_shares(config.shares, size)
    if strategy == "data":
        require(batch_size >= size, "--batch-size", batch_size, f"at least the {size} nodes")
        rows: Rows = tuple((rank,) for rank in range(size))
    else:
        rows = replica_rows(strategy, config.replicas, size)
        for row in rows:
            allowed = f"such that the {len(row)} nodes that hold one model fill whole rows"
            require(len(row) % config.columns == 0, "--columns", config.columns, allowed)
    if is_of_teams(strategy):
        allowed = f"so many that the {size} nodes make two stages or more, of equally many nodes"
        require(size % config.members == 0 and size > config.members > 1, "--members", config.members, allowed)
    number = micro_batches(config, strategy, rows, batch_size)
    return Shape(strategy, rows, number, -(-batch_size // number), shares)


def candidate_strategies(config: RunConfig, size: int) -> list[str]:
    """Return the candidate strategies on `size` ranks: the requested one, or all that the other options allow.

    The first one is chosen unless another is much faster. Data parallelism comes first.
    """
    if config.strategy != "auto" or config.shares != "measured" or size == 1:
        return ["data" if config.strategy == "auto" else config.strategy]
    others = [name for name in STRATEGIES if name not in ("auto", "data") and not is_of_teams(name)]
    return ["data", *(name for name in others if strategy_conflict(config, name) is None)]


def those_of_one_process(names: list[str], model: nn.Module) -> list[str]:
    """Return `names` without pipelines for a model with BatchNorm, if others remain: they normalise micro-batches."""
    return [name for name in names if not (is_pipeline(name) and has_batch_norm(model))] or names


def replica_rows(strategy: str, replicas: str | None, size: int) -> Rows:
    """Return the ranks of every replica: neighbours.

    Args:
        strategy: with `data+`, there are several replicas.
        replicas: their sizes as the user named them, such as `3,2`; None for two halves.
        size: number of ranks.

    Raises:
        InvalidValue: the sizes do not make up all ranks.
    """
    if not strategy.startswith("data+"):
        return (tuple(range(size)),)
    require(size > 1, "--local-nodes", size, f"at least 2 for {strategy}")
    sizes = _replica_sizes(replicas, size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(range(start, start + length)) for start, length in zip(starts, sizes, strict=True))


def _replica_sizes(replicas: str | None, size: int) -> Sequence[int]:
    if replicas is None:
        return [size - size // 2, size // 2]
    allowed = f"sizes such as 3,2 that sum to the {size} nodes"
    try:
        sizes = [int(text) for text in replicas.split(",")]
    except ValueError:
        raise InvalidValue("--replicas", replicas, allowed) from None
    require(min(sizes) > 0 and sum(sizes) == size, "--replicas", replicas, allowed)
    return sizes


def micro_batches(config: RunConfig, strategy: str, rows: Rows, batch_size: int) -> int:
    """Return the number of micro-batches of a step. Raise InvalidValue if it exceeds the samples."""
    if not is_pipeline(strategy):
        return config.accumulate
    if config.micro_batches is not None:
        allowed = f"at most {batch_size // len(rows)}: a sample for every replica in each"
        require(config.micro_batches * len(rows) <= batch_size, "--micro-batches", config.micro_batches, allowed)
        return config.micro_batches
    lengths = [len(row) // (config.members if is_of_teams(strategy) else 1) for row in rows]
    least = MIN_SAMPLES * sum(lengths) // min(lengths)  # so that the smallest replica has as many
    return max(1, min(PIPELINE_DEPTH * max(lengths), batch_size // least))


def choose(names: Sequence[str], misfit: str, estimates: Sequence[CostEstimate]) -> str:
    """Choose one of the strategies `names`: the first, unless it does not fit or another is much faster.

    Args:
        names: candidates; the first of several is `data`, unless it is excluded.
        misfit: why a node cannot hold the whole model; empty if all can.
        estimates: of those that fit, fastest first.

    Raises:
        DoesNotFit: the first does not fit, and the layers may not be divided among the nodes.
    """
    if misfit:
        if "pipeline" not in names:
            raise DoesNotFit(misfit)
        return "pipeline"
    others = names[1:] if names[0] == "data" else names
    divided = next((estimate for estimate in estimates if estimate.strategy in others), None)
    whole = _of_whole_models(estimates, others)
    if names[0] != "data":
        return names[0] if divided is None else divided.strategy
    if divided is None or (whole is not None and whole.step_seconds <= MIN_GAIN * divided.step_seconds):
        return names[0]
    return divided.strategy


def why_divided(
    names: Sequence[str], chosen: str, misfit: str, estimates: Sequence[CostEstimate]
) -> tuple[Rejected, ...]:
    """Return why data parallelism was rejected; empty if it was not. Arguments as for `choose`."""
    if names[0] != "data" or chosen == "data":
        return ()
    if misfit:
        return (Rejected(what="data", reason=misfit),)
    whole = _of_whole_models(estimates, names[1:])
    if whole is None:
        return (Rejected(what="data", reason="whole models and their batches do not fit the memory at once"),)
    divided = next(estimate for estimate in estimates if estimate.strategy == chosen)
    factor = whole.step_seconds / divided.step_seconds
    reason = f"{chosen} is predicted to be {factor:.2f} times as fast"
    return (Rejected(what="data", reason=reason, step_seconds=whole.step_seconds),)


def _of_whole_models(estimates: Sequence[CostEstimate], others: Sequence[str]) -> CostEstimate | None:
    """Return the fastest with whole models whose batches fit at once; None if there is none."""
    return next((one for one in estimates if one.strategy not in others and one.accumulate == 1), None)


def divide(
    shape: Shape,
    nodes: Sequence[NodeSpec],
    workers: Sequence[NodeCost],
    batch_size: int,
    exchange: GradientSync | None = None,
) -> Plan:
    """Divide the work among nodes.

    Args:
        shape: the replicas and the number of micro-batches.
        nodes: one a rank.
        workers: costs of a micro-batch on each; empty without measurements. A pipeline measures its parts by itself.
        batch_size: samples of a step.
        exchange: the exchanges of whole models; None if models are divided.

    Raises:
        InvalidValue: there is not a sample for every replica, or a replica has no speed.
    """
    is_timed = bool(workers) and not shape.strategy.startswith("pipeline")
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
