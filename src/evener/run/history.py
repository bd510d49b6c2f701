"""What happened so far in a run, and one step of it as all ranks reported it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.record import Event, NodeStep, Step, Validation
from evener.run.recorder import StepLog
from evener.run.reports import StepReport


@dataclass
class History:
    """What happened so far, as the leader writes it down.

    Attributes:
        log: of steps.
        validations: in order.
        events: in order; checkpoints on the leader only, which writes them.
        train_seconds: of all steps, validations and checkpoints left out.
        seconds: of the whole loop.
    """

    log: StepLog = field(default_factory=StepLog)
    validations: list[Validation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    train_seconds: float = 0.0
    seconds: float = 0.0


def step_of(reports: Sequence[StepReport]) -> Step:
    """One step from every rank's report of it, in order of ranks."""
    seconds = max(report.wall for report in reports)
    return Step(
        step=reports[0].step,
        epoch=reports[0].epoch,
        samples=reports[0].total,
        loss=sum(report.loss for report in reports),
        seconds=seconds,
        nodes=tuple(
            NodeStep(
                samples=report.samples,
                io_seconds=report.io,
                compute_seconds=report.fb,
                wait_seconds=max(0.0, report.wall - report.computing) if len(reports) > 1 else 0.0,
                update_seconds=report.wu,
                sent_bytes=report.sent,
            )
            for report in reports
        ),
    )
