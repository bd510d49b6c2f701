"""Which strategy a run was asked for, and what of the user's words goes with it; everything else is refused."""

from __future__ import annotations

from collections.abc import Sequence

from evener.errors import InvalidInput, InvalidValue, require
from evener.oracle.division.rules import Division
from evener.oracle.schedule import SCHEDULES
from evener.parallel.pipeline.partition_plan import POLICIES
from evener.run.order import Order

DIVISIONS: dict[str, Division] = {
    "filter": "filter",
    "channel": "channel",
    "hybrid": "hybrid",
    "sharded": "sharded",
    "spatial": "spatial",
}
"""By name of a strategy, the column of the oracle's table that it is."""
STRATEGIES = ("auto", "data", *DIVISIONS, "pipeline", *(f"data+{name}" for name in (*DIVISIONS, "pipeline")))


def check_strategy(order: Order) -> None:
    """Raises InvalidInput if the words of `order` do not go together; knows nothing of the nodes yet."""
    strategy = order.strategy
    require(strategy in STRATEGIES, "--strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    require(order.schedule in SCHEDULES, "--schedule", order.schedule, f"one of {', '.join(SCHEDULES)}")
    require(order.rematerialise in POLICIES, "--rematerialise", order.rematerialise, f"one of {', '.join(POLICIES)}")
    micro = order.micro_batches
    require(micro is None or micro > 0, "--micro-batches", micro, "positive")
    _refuse(order, order.replicas is not None and not strategy.startswith("data+"), "--replicas", "data+...")
    pipeline = is_pipeline(strategy)
    _refuse(order, not pipeline and micro is not None, "--micro-batches", "pipelines; others have --accumulate")
    _refuse(order, pipeline and order.accumulate > 1, "--accumulate", "others; pipelines have --micro-batches")
    _refuse(order, not pipeline and order.schedule != "1f1b", "--schedule", "pipelines")
    _refuse(
        order, strategy == "pipeline" and order.shares != "measured", "--shares", "others: stages follow the layers"
    )
    if strategy in ("auto", "data"):
        _refuse(order, order.rematerialise != "auto", "--rematerialise", "models that are divided")
        return
    _refuse(order, order.stationary, "--stationary", "data parallelism: nodes that share a model share its samples")
    _refuse(order, order.compile and pipeline, "--compile", "others than pipelines")
    _refuse(order, order.precision == "fp16", "--precision fp16", "data parallelism; take bf16")
    if not pipeline:
        allowed = ("auto", "never", "always")
        require(order.rematerialise in allowed, "--rematerialise", order.rematerialise, f"one of {', '.join(allowed)}")


def is_pipeline(strategy: str) -> bool:
    """Whether the layers are divided into stages."""
    return strategy.endswith("pipeline")


def division_of(strategy: str) -> Division:
    """The column of the oracle's table that divides the layers."""
    return DIVISIONS[strategy.removeprefix("data+")]


def replica_rows(strategy: str, replicas: str | None, size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every replica: neighbours.

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
    sizes = _sizes(replicas, size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(range(start, start + own)) for start, own in zip(starts, sizes, strict=True))


def _sizes(replicas: str | None, size: int) -> Sequence[int]:
    if replicas is None:
        return [size - size // 2, size // 2]
    allowed = f"sizes such as 3,2 that sum to the {size} nodes"
    try:
        sizes = [int(text) for text in replicas.split(",")]
    except ValueError:
        raise InvalidValue("--replicas", replicas, allowed) from None
    require(min(sizes) > 0 and sum(sizes) == size, "--replicas", replicas, allowed)
    return sizes


def _refuse(order: Order, wrong: bool, option: str, whom: str) -> None:
    if wrong:
        raise InvalidInput(f"{option} does not go with --strategy {order.strategy}: it is for {whom}")
