"""Plan: work of every rank, predicted cost, rejected alternatives; made by the oracle, followed by `training`."""

from __future__ import annotations

from typing import Literal

from evener.records.errors import require, require_not_negative, require_positive
from evener.records.schema import Amount, Finite, Noun, Part

# docs/adding-a-strategy.md lists what a new one needs.
Strategy = Literal[
    "serial",
    "data",
    "spatial",
    "filter",
    "channel",
    "hybrid",
    "sharded",
    "pipeline",
    "data+spatial",
    "data+filter",
    "data+channel",
    "data+hybrid",
    "data+sharded",
    "data+pipeline",
    "pipeline+filter",
    "pipeline+channel",
    "pipeline+hybrid",
    "averaging",  # this and the next two are agreements, as `evener plan` prices them
    "server",
    "asynchronous server",
]


WHOLE_MODEL = ("auto", "serial", "data")
"""Strategies in which every rank has the whole model; `auto` counts as one of them until the plan says which."""


def is_of_teams(strategy: str) -> bool:
    """Return whether several ranks divide the layers of every stage of a pipeline."""
    return strategy.startswith("pipeline+")


def is_pipeline(strategy: str) -> bool:
    """Return whether the layers are divided into stages."""
    return "pipeline" in strategy


class Assignment(Part, frozen=True, kw_only=True):
    """One rank's part of the work.

    Attributes:
        rank: rank in the training group, from 0.
        node: name of the machine.
        device: device, as PyTorch names it.
        samples: samples of every full micro-batch; ranks of one replica work on the same ones.
        fixed_seconds: seconds of a step on this rank that do not depend on its samples (update, start of kernels).
        sample_seconds: seconds for each further sample, forward and backward; 0 where the node was not timed.
        max_samples: largest micro-batch that fits; None if nothing bounds it.
        reason: explanation of this share.
        replica: number of the whole model that this rank holds a part of; None: it holds a model of its own.
        share: fraction of its replica's filters, channels, rows or layers' work.
        stage: stage of its replica's pipeline, from 0; 0 where there is none.
        first_layer: first layer of its stage of a pipeline; empty where layers are not divided.
        memory_bytes: predicted peak memory; 0 where that was not predicted.
    """

    rank: Amount
    node: str
    device: str
    samples: Amount
    fixed_seconds: Finite = 0.0
    sample_seconds: Finite = 0.0
    max_samples: Amount | None = None
    reason: str = ""
    replica: Amount | None = None
    share: Finite = 1.0
    stage: Amount = 0
    first_layer: str = ""
    memory_bytes: Amount = 0

    def __post_init__(self) -> None:
        require_not_negative(self, "rank", "stage", "memory_bytes", "samples")
        require(0 <= self.share <= 1, "share", self.share, "a fraction, 0 to 1")
        if self.max_samples is not None:
            allowed = f"at most max_samples ({self.max_samples})"
            require(self.samples <= self.max_samples, "samples", self.samples, allowed)


class Rejected(Part, frozen=True, kw_only=True):
    """A rejected alternative, or a node that is left out.

    Attributes:
        what: the alternative, such as `node-2` or `equal shares`.
        reason: reason of the rejection.
        step_seconds: predicted seconds of a step; None if it could not run.
        is_node: whether it is a node, which is left out.
    """

    what: str
    reason: str
    step_seconds: Finite | None = None
    is_node: bool = False


class Prediction(Part, frozen=True, kw_only=True):
    """The predicted cost of a step of the plan.

    Attributes:
        step_seconds: seconds of one optimizer step.
        compute_seconds: computing seconds of the slowest rank.
        communication_seconds: exposed seconds of all collectives.
        sent_bytes: bytes per rank and step.
        alone_seconds: seconds of one step on the fastest device alone; None where it does not fit.
        waiting_seconds: seconds that the slowest rank waits for others, as in the bubbles of a pipeline.
        bottleneck: description of what takes longest.
        spread: in four of five cases a step takes between `step_seconds` divided by and multiplied with 1 + spread; 0
            where this is not known.
    """

    step_seconds: Finite
    compute_seconds: Finite
    communication_seconds: Finite
    sent_bytes: Amount
    alone_seconds: Finite | None = None
    waiting_seconds: Finite = 0.0
    bottleneck: str = ""
    spread: Finite = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which a step takes in four of five cases."""
        return self.step_seconds / (1 + self.spread), self.step_seconds * (1 + self.spread)


class Check(Part, frozen=True, kw_only=True):
    """The check, before the first step, that the ranks train the same as one process.

    Attributes:
        samples: samples of every replica in the check.
        precisions: precisions of the check.
        where: what differed most.
        off: difference, relative to its size.
        seconds: seconds of the check.
    """

    samples: tuple[int, ...]
    precisions: tuple[str, ...]
    where: str
    off: Finite
    seconds: Finite


class Plan(Noun, frozen=True, kw_only=True):
    """The work of all ranks.

    Attributes:
        strategy: strategy by which the work is divided.
        batch_size: samples of one optimizer step, over all ranks and micro-batches.
        accumulate: micro-batches of one step.
        assignments: one per rank, in order; samples of all replicas sum to batch_size / accumulate, rounded up.
        prediction: prediction of one step, where it could be made.
        rejected: alternatives and left-out nodes with reasons.
        local_steps: steps that each replica makes between two exchanges; 1: they synchronize after every step.
        advice: advice with its reason, in at most two sentences.
        check: check that it trains the same as one process; None where that was not checked.
        copy_steps: steps between two copies of every rank's part in the memory of the next rank; 0: none are made.
        columns: ranks side by side that divide the columns of images; the ranks of a replica follow row by row.
        members: ranks that divide the layers of one stage of a pipeline, one after the other; 1: a rank has a stage.
        schedule: order of the passes of a pipeline; empty for others, and before a pipeline is cut.
        ring: latency in seconds, and seconds per byte, of one step of a ring of all ranks; None: not measured.
        line_rates: bytes per second that each node's line carries each way, by which sums of gradients are divided;
            empty if they are made in a ring.
    """

    strategy: Strategy
    batch_size: Amount
    accumulate: Amount = 1
    assignments: tuple[Assignment, ...]
    prediction: Prediction | None = None
    rejected: tuple[Rejected, ...] = ()
    local_steps: Amount = 1
    advice: str = ""
    check: Check | None = None
    copy_steps: Amount = 0
    columns: Amount = 1
    members: Amount = 1
    schedule: Literal["", "gpipe", "1f1b", "zero-bubble"] = ""
    ring: tuple[Finite, Finite] | None = None
    line_rates: dict[str, Finite] = {}

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "local_steps", "columns", "members")
        require(0 < self.accumulate <= self.batch_size, "accumulate", self.accumulate, f"1 to {self.batch_size}")
        require(bool(self.assignments), "assignments", self.assignments, "at least one rank")
        ranks = [a.rank for a in self.assignments]
        require(ranks == list(range(len(ranks))), "assignments", ranks, "ranks 0, 1, 2 ... in order")
        is_whole = all(len(ranks) % self.columns == 0 for ranks in self.replica_ranks)
        require(is_whole, "columns", self.columns, "such that the ranks of every replica fill whole rows")
        is_whole = all(len(ranks) % self.members == 0 for ranks in self.replica_ranks)
        require(is_whole, "members", self.members, "such that the ranks of every replica fill whole stages")
        lowest = min(self.line_rates.values(), default=1.0)
        require(lowest > 0, "line_rates", lowest, "positive")
        total = sum(self.replica_samples)
        require(total == self.micro_batch_size, "assignments", total, f"samples that sum to {self.micro_batch_size}")

    def part(self, assignment: Assignment) -> float:
        """Return the fraction of all work in `assignment`: of the samples, and of its replica's work on them."""
        return assignment.samples * assignment.share / self.micro_batch_size

    @property
    def replica_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every replica, in order."""
        ranks: dict[int | tuple[str, int], list[int]] = {}
        for a in self.assignments:
            ranks.setdefault(a.rank if a.replica is None else ("replica", a.replica), []).append(a.rank)
        return tuple(tuple(members) for members in ranks.values())

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share a stage, in order of stages; one after the other if these are not known."""
        ranks = sorted(self.assignments, key=lambda a: (a.stage, a.rank))
        return tuple(
            tuple(a.rank for a in ranks[start : start + self.members]) for start in range(0, len(ranks), self.members)
        )

    @property
    def replica_samples(self) -> tuple[int, ...]:
        """Samples of every replica in a full micro-batch."""
        return tuple(self.assignments[ranks[0]].samples for ranks in self.replica_ranks)

    @property
    def loaded_micro_batches(self) -> int:
        """Micro-batches that a rank loads per step, one after the other; a pipeline makes its micro-batches itself."""
        return 1 if is_pipeline(self.strategy) else self.accumulate

    @property
    def micro_batch_size(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.batch_size // self.accumulate)
