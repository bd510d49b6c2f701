"""Figures derived from a record: the typical step, and where each node's time went. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from evener.records.record import NodeStep, NodeSummary, Step, TrainRecord


class TypicalStep(NamedTuple):
    """The median step of a run, comparable with a plan's Prediction.

    If ranks exchange gradients every `local_steps` steps, one step of the median cycle.

    Attributes:
        step_seconds: duration of the whole step.
        compute_seconds: of the rank that computes longest.
        communication_seconds: that this rank waits for gradients and statistics, as far as no computation hides them.
        sent_bytes: of the rank that sends most; an average over all steps if exchanges are several steps apart.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    sent_bytes: float


class NodePhases(NamedTuple):
    """Seconds that one node spent in each phase of a run."""

    name: str
    loading: float
    computing: float
    updating: float
    waiting: float

    @property
    def seconds(self) -> float:
        """The sum of all phases."""
        return self.loading + self.computing + self.updating + self.waiting


def spans(record: TrainRecord) -> list[int]:
    """Return the number of optimiser steps that each entry of `record.steps` sums up."""
    if not record.steps:
        return []
    numbers = [entry.step for entry in record.steps]
    first = min(record.every, numbers[0])
    return [max(first, 1), *(max(after - before, 1) for before, after in pairwise(numbers))]


def typical_step(record: TrainRecord) -> TypicalStep | None:
    """Return the median step of `record`; None if it holds no steps."""
    cycles = list(_cycles(record))
    if not cycles:
        return None
    typical = TypicalStep(*(median(values) for values in zip(*(_per_step(*cycle) for cycle in cycles), strict=True)))
    if record.plan.local_steps == 1:
        return typical
    sent = Counter[int]()  # the number of steps between exchanges may change in a run
    for entry in record.steps:
        sent.update({rank: node.sent_bytes for rank, node in enumerate(entry.nodes)})
    return typical._replace(sent_bytes=max(sent.values(), default=0) / sum(spans(record)))


def _cycles(record: TrainRecord) -> Iterator[tuple[list[Step], int]]:
    """Yield the entries from one exchange of gradients to the next, with their number of steps.

    An incomplete cycle at the end counts only if there is no complete one.
    """
    entries: list[Step] = []
    steps, has_cycle = 0, False
    for entry, span in zip(record.steps, spans(record), strict=True):
        if entries and len(entry.nodes) != len(entries[0].nodes):
            entries, steps = [], 0
        entries.append(entry)
        steps += span
        if steps >= record.plan.local_steps:
            yield entries, steps
            entries, steps, has_cycle = [], 0, True
    if entries and not has_cycle:
        yield entries, steps


def _per_step(entries: Sequence[Step], steps: int) -> TypicalStep:
    nodes = list(zip(*(entry.nodes for entry in entries), strict=True))
    slowest = max(nodes, key=_computed, default=())
    return TypicalStep(
        step_seconds=sum(entry.seconds for entry in entries) / steps,
        compute_seconds=_computed(slowest) / steps,
        communication_seconds=sum(part.wait_seconds for part in slowest) / steps,
        sent_bytes=max((sum(part.sent_bytes for part in parts) for parts in nodes), default=0) / steps,
    )


def _computed(parts: Sequence[NodeStep]) -> float:
    """Return the seconds that one node computed in `parts`."""
    return sum(part.io_seconds + part.compute_seconds + part.update_seconds for part in parts)


def node_phases(record: TrainRecord) -> list[NodePhases]:
    """Return the seconds by phase of every node of `record`.

    The split of computing into phases comes from the steps in which all of `record.nodes` took part. Without such steps
    all of it counts as computing.
    """
    entries = [entry.nodes for entry in record.steps if len(entry.nodes) == len(record.nodes)]
    by_rank = list(zip(*entries, strict=True)) or [()] * len(record.nodes)
    return [_phases(node, steps) for node, steps in zip(record.nodes, by_rank, strict=True)]


def _phases(node: NodeSummary, steps: Sequence[NodeStep]) -> NodePhases:
    busy = _computed(steps)
    scale = node.seconds_computing / busy if busy else 0.0
    loading, updating = (scale * sum(getattr(step, f"{phase}_seconds") for step in steps) for phase in ("io", "update"))
    return NodePhases(
        node.name,
        loading=loading,
        computing=node.seconds_computing - loading - updating,
        updating=updating,
        waiting=node.seconds_waiting,
    )


def waiting_fraction(nodes: Sequence[NodeSummary]) -> float:
    """Return the fraction of the nodes' time that they waited for others, in [0, 1]."""
    waiting = sum(node.seconds_waiting for node in nodes)
    total = waiting + sum(node.seconds_computing for node in nodes)
    return waiting / total if total else 0.0
