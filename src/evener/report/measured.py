"""What a record adds up to: the typical step, and where each node's time went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from evener.record import NodeStep, NodeSummary, Step, TrainRecord


class TypicalStep(NamedTuple):
    """The median step of a run; comparable with a plan's Prediction.

    Attributes:
        step_seconds: of the whole step.
        compute_seconds: of the rank that computes longest.
        communication_seconds: that this rank waits, for gradients and statistics that nothing hid.
        sent_bytes: of the rank that sends most.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    sent_bytes: float


class NodePhases(NamedTuple):
    """Seconds of one node over a run, by phase."""

    name: str
    loading: float
    computing: float
    updating: float
    waiting: float

    @property
    def seconds(self) -> float:
        """All phases together."""
        return self.loading + self.computing + self.updating + self.waiting


def spans(record: TrainRecord) -> list[int]:
    """Number of optimiser steps that each entry of `record.steps` sums."""
    if not record.steps:
        return []
    numbers = [entry.step for entry in record.steps]
    first = min(record.every, numbers[0])
    return [max(first, 1), *(max(after - before, 1) for before, after in pairwise(numbers))]


def typical_step(record: TrainRecord) -> TypicalStep | None:
    """The median step of `record`; None if it holds no steps."""
    each = [_per_step(entry, span) for entry, span in zip(record.steps, spans(record), strict=True)]
    if not each:
        return None
    return TypicalStep(*(median(values) for values in zip(*each, strict=True)))


def _per_step(entry: Step, span: int) -> TypicalStep:
    slowest = max(entry.nodes, key=_computed, default=None)
    return TypicalStep(
        step_seconds=entry.seconds / span,
        compute_seconds=_computed(slowest) / span if slowest else 0.0,
        communication_seconds=slowest.wait_seconds / span if slowest else 0.0,
        sent_bytes=max((node.sent_bytes for node in entry.nodes), default=0) / span,
    )


def _computed(node: NodeStep) -> float:
    return node.io_seconds + node.compute_seconds + node.update_seconds


def node_phases(record: TrainRecord) -> list[NodePhases]:
    """Seconds by phase of every node of `record`.

    Phases come from the steps in which all of `record.nodes` took part; of a run without such steps, all that is known
    is computing and waiting.
    """
    entries = [entry.nodes for entry in record.steps if len(entry.nodes) == len(record.nodes)]
    if not entries:
        return [NodePhases(n.name, 0.0, n.seconds_computing, 0.0, n.seconds_waiting) for n in record.nodes]
    by_rank = zip(*entries, strict=True)
    return [_sum(node.name, steps) for node, steps in zip(record.nodes, by_rank, strict=True)]


def _sum(name: str, steps: tuple[NodeStep, ...]) -> NodePhases:
    return NodePhases(
        name,
        loading=sum(step.io_seconds for step in steps),
        computing=sum(step.compute_seconds for step in steps),
        updating=sum(step.update_seconds for step in steps),
        waiting=sum(step.wait_seconds for step in steps),
    )


def waiting_fraction(nodes: Sequence[NodeSummary]) -> float:
    """The part of the nodes' time that they waited for others, in [0, 1]."""
    waiting = sum(node.seconds_waiting for node in nodes)
    total = waiting + sum(node.seconds_computing for node in nodes)
    return waiting / total if total else 0.0
