"""What a record adds up to: the typical step, and where each node's time went. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from evener.records.record import NodeStep, NodeSummary, Step, TrainRecord


class TypicalStep(NamedTuple):
    """The median step of a run; comparable with a plan's Prediction.

    Where ranks exchange gradients after several steps, it is the median over as many steps, of one of them.

    Attributes:
        step_seconds: of the whole step.
        compute_seconds: of the rank that computes longest.
        communication_seconds: that this rank waits, for gradients and statistics that nothing hid.
        sent_bytes: of the rank that sends most; on the average over all steps where exchanges follow several.
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
    cycles = list(_cycles(record))
    if not cycles:
        return None
    typical = TypicalStep(*(median(values) for values in zip(*(_per_step(*cycle) for cycle in cycles), strict=True)))
    if record.plan.local_steps == 1:
        return typical
    sent = Counter[int]()  # how many steps an exchange follows may change in a run
    for entry in record.steps:
        sent.update({rank: node.sent_bytes for rank, node in enumerate(entry.nodes)})
    return typical._replace(sent_bytes=max(sent.values(), default=0) / sum(spans(record)))


def _cycles(record: TrainRecord) -> Iterator[tuple[list[Step], int]]:
    """Neighbouring entries from one exchange of gradients to the next, with the number of their steps.

    What is left at the end counts only if there is nothing else.
    """
    entries: list[Step] = []
    steps, found = 0, False
    for entry, span in zip(record.steps, spans(record), strict=True):
        if entries and len(entry.nodes) != len(entries[0].nodes):
            entries, steps = [], 0
        entries.append(entry)
        steps += span
        if steps >= record.plan.local_steps:
            yield entries, steps
            entries, steps, found = [], 0, True
    if entries and not found:
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
    """Seconds of one node in some steps."""
    return sum(part.io_seconds + part.compute_seconds + part.update_seconds for part in parts)


def node_phases(record: TrainRecord) -> list[NodePhases]:
    """Seconds by phase of every node of `record`: all that it computed and waited.

    How its computing divides into phases comes from the steps in which all of `record.nodes` took part; without such
    steps all of it is called computing.
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
    """The part of the nodes' time that they waited for others, in [0, 1]."""
    waiting = sum(node.seconds_waiting for node in nodes)
    total = waiting + sum(node.seconds_computing for node in nodes)
    return waiting / total if total else 0.0
