"""What a strategy means for so many ranks: who holds a model together, in how many micro-batches, with which shares.

Pure: no rank is asked anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evener.errors import InvalidValue, require
from evener.oracle.division.rules import Division
from evener.run.config import STRATEGIES, RunConfig, is_pipeline, strategy_conflict

PIPELINE_DEPTH = 4
"""Micro-batches a stage: bubbles then take a fifth of a step at most (Huang et al., 2019, section 2.3)."""
LEAST_SAMPLES = 2
"""Of a micro-batch, unless the user wants fewer: of a single one BatchNorm makes no statistics."""

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


def shape_of(config: RunConfig, strategy: str, size: int, batch_size: int) -> Shape:
    """How `strategy` divides steps of `batch_size` samples among `size` ranks. Raises InvalidValue: it cannot."""
    shares = relative_shares(config.shares, size)
    if strategy == "data":
        require(batch_size >= size, "--batch-size", batch_size, f"at least the {size} nodes")
        rows: Rows = tuple((rank,) for rank in range(size))
    else:
        rows = replica_rows(strategy, config.replicas, size)
    number = micro_batches(config, strategy, rows, batch_size)
    return Shape(strategy, rows, number, -(-batch_size // number), shares)


def candidate_strategies(config: RunConfig, size: int) -> list[str]:
    """The strategies from which to choose on so many ranks: the one that was asked for, or all that go with the rest.

    The first one is taken unless another is much better. Whole models are best known, so data parallelism is first.
    """
    if config.strategy != "auto" or config.shares != "measured" or size == 1:
        return ["data" if config.strategy == "auto" else config.strategy]
    others = [name for name in STRATEGIES if name not in ("auto", "data")]
    return ["data", *(name for name in others if strategy_conflict(config, name) is None)]


def division_of(strategy: str) -> Division:
    """The column of the oracle's table that divides the layers."""
    return strategy.removeprefix("data+")  # type: ignore[return-value]  # it divides layers


def replica_rows(strategy: str, replicas: str | None, size: int) -> Rows:
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
    sizes = _replica_sizes(replicas, size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(range(start, start + own)) for start, own in zip(starts, sizes, strict=True))


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
    """Of a step. Raises InvalidValue: they are more than there are samples."""
    if not is_pipeline(strategy):
        return config.accumulate
    if config.micro_batches is not None:
        allowed = f"at most {batch_size // len(rows)}: a sample for every replica in each"
        require(config.micro_batches * len(rows) <= batch_size, "--micro-batches", config.micro_batches, allowed)
        return config.micro_batches
    lengths = [len(row) for row in rows]
    least = LEAST_SAMPLES * sum(lengths) // min(lengths)  # so that the smallest replica has as many
    return max(1, min(PIPELINE_DEPTH * max(lengths), batch_size // least))


def relative_shares(shares: str, size: int) -> list[float] | None:
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
