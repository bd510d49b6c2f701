"""A run in comparison with others: its curves over time and samples, and its figures so far, or its final ones."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from evener.records.record import Validation
from evener.records.schema import Part
from evener.report.live.live_run import LiveRun

_MAX_POINTS = 1000


class ComparedPoint(NamedTuple):
    """A point of a curve: seconds in steps and samples until then, and the value."""

    seconds: float
    samples: int
    value: float


class ComparedRun(Part, frozen=True, kw_only=True):
    """One run beside others.

    Attributes:
        run: name of the run.
        task: name of its task.
        phase: current phase.
        is_over: whether the figures are final.
        seconds: training time: of the record, or in steps so far.
        samples: number of samples trained on so far.
        samples_per_second: average speed.
        ideal: fraction of the speed that the nodes would reach if none waited; None if unknown.
        sent_bytes: bytes sent by all nodes.
        loss: mean training loss of the last epoch.
        accuracy: last validation accuracy, in [0, 1].
        losses: training loss.
        accuracies: validation accuracy.
    """

    run: str
    task: str
    phase: str
    is_over: bool
    num_nodes: int
    seconds: float
    samples: int
    samples_per_second: float
    ideal: float | None
    sent_bytes: int
    loss: float | None
    accuracy: float | None
    losses: list[ComparedPoint]
    accuracies: list[ComparedPoint]


class Comparison(Part, frozen=True, kw_only=True):
    """The runs that a page compares.

    Attributes:
        choices: names of all runs that can be compared, newest first.
        runs: the chosen ones.
    """

    choices: list[str]
    runs: list[ComparedRun]


def compared(run: LiveRun) -> ComparedRun:
    """Return `run` as it is compared with others."""
    history, record = run.history, run.record
    entries = [*history.entries, *([history.open] if history.open.steps else [])]
    seconds = list(accumulate(entry.seconds for entry in entries))
    samples = list(accumulate(entry.samples for entry in entries))
    steps = [entry.step for entry in entries]
    losses = [
        ComparedPoint(when, count, entry.mean_loss)
        for entry, when, count in zip(entries, seconds, samples, strict=True)
        if entry.mean_loss is not None
    ]
    accuracies = [
        ComparedPoint(seconds[done - 1], samples[done - 1], one.accuracy)
        for _, one in run.log
        if isinstance(one, Validation) and one.accuracy is not None and (done := bisect_right(steps, one.step))
    ]
    picture = run.picture()
    total_seconds, total_samples = (seconds or [0.0])[-1], (samples or [0])[-1]
    sent = sum(node.bytes_sent for node in record.nodes) if record else sum(w.sent for w in history.totals.values())
    return ComparedRun(
        run=run.name,
        task=picture.task,
        phase=picture.phase,
        is_over=run.is_over,
        num_nodes=len(history.names),
        seconds=record.seconds if record else total_seconds,
        samples=total_samples,
        samples_per_second=total_samples / total_seconds if total_seconds else 0.0,
        ideal=picture.ideal,
        sent_bytes=sent,
        loss=picture.loss,
        accuracy=accuracies[-1].value if accuracies else None,
        losses=losses[:: max(1, -(-len(losses) // _MAX_POINTS))],
        accuracies=accuracies,
    )
