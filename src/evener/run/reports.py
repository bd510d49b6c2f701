"""The ranks tell each other, one step late, how their step went: what re-balancing, progress and stopping rest on.

A row of numbers per rank travels while the next step computes, so that it costs no waiting.
Everybody sees the same rows and decides alike: nobody has to be asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from evener.comm.group import Group
from evener.history import Entry, NodeWork


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """How a step went on one rank.

    Attributes:
        step: from 1.
        samples: computed in it.
        total: samples of the step over all ranks.
        epoch: from 0.
        loss: this rank's part of the mean loss of the step.
        wall: seconds of the step on this rank.
        timed_samples: samples that the next three seconds belong to (on a GPU those of a step before).
        io: seconds of loading.
        fb: seconds of forward and backward.
        wu: seconds of the update.
        sent: bytes handed to collectives.
        stop: 1 if this rank was asked to stop.
    """

    step: int
    samples: int
    total: int
    epoch: int
    loss: float
    wall: float
    timed_samples: int
    io: float
    fb: float
    wu: float
    sent: int
    stop: int

    @property
    def computing(self) -> float:
        """Seconds of all phases."""
        return self.io + self.fb + self.wu


_TYPES: tuple[type, ...] = tuple({"int": int, "float": float}[str(f.type)] for f in fields(StepReport))


class Reports:
    """Rows sent and not yet read, oldest first."""

    def __init__(self, group: Group) -> None:
        self._mesh = group.reports
        self._own: deque[bytes] = deque()

    def __len__(self) -> int:
        """Number of steps whose reports were sent and not read."""
        return len(self._own)

    def send(self, report: StepReport) -> None:
        """Tell the others; returns at once."""
        row = np.asarray(astuple(report), dtype=np.float64).tobytes()
        self._own.append(row)
        if self._mesh is not None:
            self._mesh.send(row)

    def receive(self) -> list[StepReport]:
        """All ranks' reports of the oldest step, in order of ranks; waits for the last of them."""
        own = self._own.popleft()
        rows = [own] if self._mesh is None else self._mesh.receive()
        return [_report(np.frombuffer(row).tolist()) for row in rows]


def entry_of(reports: Sequence[StepReport]) -> Entry:
    """One step of the history from every rank's report of it; its columns are named by the ranks."""
    first = reports[0]
    return Entry(
        step=first.step,
        epoch=first.epoch,
        samples=first.total,
        loss=sum(report.loss for report in reports) * first.total,
        seconds=max(report.wall for report in reports),
        steps=1,
        nodes={
            str(rank): NodeWork(
                samples=report.samples,
                compute_seconds=report.fb,
                sent=report.sent,
                io_seconds=report.io,
                update_seconds=report.wu,
                wait_seconds=max(0.0, report.wall - report.computing) if len(reports) > 1 else 0.0,
            )
            for rank, report in enumerate(reports)
        },
    )


def _report(row: list[float]) -> StepReport:
    return StepReport(**{f.name: t(v) for f, t, v in zip(fields(StepReport), _TYPES, row, strict=True)})
