"""A rank's part of a run from its plan to the record, which is the same for every front end.

    session = TrainingSession(env, group, plan, division=division, balance=balance, saving=saving)
    session.start(1)
    for step in steps:
        session.begin_step(step)
        ...                                     # load this rank's part by the division; forward, backward, update
        session.end_step(step, result)          # receive the reports of all ranks, which may move shares
        session.save_if_due(step)
    session.validated(...)
    record = session.record(...)

A front end brings its own loop, model and data. docs/adding-a-front-end.md says what a front end supplies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from evener.benchmark.device import environment
from evener.comm.group import Group
from evener.data.sampler import Division
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.rebalance import Balance
from evener.records.decoding import decode_json
from evener.records.errors import Interrupted
from evener.records.history import History
from evener.records.plan import Plan
from evener.records.record import Event, NodeSummary, TrainRecord, finite_validation
from evener.system.memory import peak_memory
from evener.training.monitor import WARM_UP, Monitor
from evener.training.saving import Saving
from evener.training.step import StepResult


class TrainingSession:
    """One rank's part of a run; every rank has one and calls its methods at the same steps.

    Args:
        env: of the rank.
        group: the ranks of the plan.
        plan: who does how much.
        division: of samples, which changes with the measured speeds; None if shares are fixed by where the data is.
        balance: the start of re-balancing; None to keep shares fixed.
        micro_batches: of a step.
        lead: steps that are loaded ahead, at most.
        warm_up: steps after the first whose times are ignored.
        saving: of checkpoints; None without.
        refuses_non_finite: whether a non-finite loss ends the run.
        is_followed: whether this rank knows that other ranks are to take part.
        is_behind: whether this rank does not have the state of the training yet.

    Attributes:
        plan: see above.
        monitor: of the steps.
    """

    def __init__(
        self,
        env: RankEnvironment,
        group: Group,
        plan: Plan,
        *,
        division: Division | None,
        balance: Balance | None,
        micro_batches: int = 1,
        lead: int = 0,
        warm_up: int = WARM_UP,
        saving: Saving | None = None,
        refuses_non_finite: bool = True,
        is_followed: Callable[[], bool] = bool,
        is_behind: Callable[[], bool] = bool,
    ) -> None:
        self._env, self._group, self.plan = env, group, plan
        group.divide_sums(plan.line_rates)
        self._saving = saving
        self._began = 0.0
        last_good = saving.last_good if saving else str
        self.monitor = Monitor(
            env,
            group,
            division=division,
            balance=balance,
            micro_batches=micro_batches,
            lead=lead,
            warm_up=warm_up,
            advice=last_good if refuses_non_finite else None,
            is_due=saving.is_time if saving else bool,
            is_followed=is_followed,
            is_behind=is_behind,
        )

    @property
    def history(self) -> History:
        """The history of the run."""
        return self.monitor.history

    @property
    def seconds(self) -> float:
        """Seconds since the first step began; those of the run where the ranks changed."""
        return self.history.wall_seconds or time.time() - self._began

    def start(self, first: int) -> None:
        """Begin with step `first`."""
        self._began = self._began or time.time()
        self.monitor.start(first)

    def begin_step(self, step: int) -> None:
        """Begin `step`."""
        self._env.at_step(step)
        self._group.timer.pace.speed = self._env.node.speed_at(step)

    def end_step(self, step: int, result: StepResult) -> None:
        """Report `step`, and receive the reports of the step before.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite.
            TrainingFailed: the ranks have different weights or learning rates.
        """
        self.monitor.add(step, result)

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint after `step` if it is time. Raises Interrupted if a rank was asked to stop."""
        if self._saving is not None:
            self._saving.tell()
            if not self.monitor.is_stopping and (self.monitor.is_saving or self._saving.is_due(step)):
                self.save(step)
        self.stop_if_asked(step)

    def save(self, step: int) -> None:
        """Write a checkpoint after `step`."""
        assert self._saving is not None
        self.monitor.settle()
        self._saving.tell()  # of the last one, where every step ends an epoch
        self._saving.save(step)
        self.monitor.is_saving = False
        self.monitor.restart_clock()

    def stop_if_asked(self, step: int) -> None:
        """Raise Interrupted after `step` if a rank was asked to stop; a checkpoint is written."""
        if not self.monitor.is_stopping:
            return
        self.monitor.settle()
        if self._saving is not None:
            self._saving.stop(step)
        raise Interrupted(f"stopped after step {step} as asked")

    def validated(self, *, step: int, epoch: int, **fields: Any) -> None:
        """Record a validation after `step`; the next step begins after it.

        Args:
            step: the last one.
            epoch: from 0.
            fields: of the Validation.

        Raises:
            NonFiniteLoss: its loss is NaN or infinite.
        """
        validation = finite_validation(self._group.nodes[0], step=step, epoch=epoch, **fields)
        self.monitor.emit(validation)
        if missing := [name for name in fields.get("metrics", ()) if name not in validation.metrics]:
            message = f"not finite after epoch {epoch + 1}: {', '.join(missing)}"
            self.monitor.emit(Event(step=step, kind="left out", message=message))
        self.monitor.restart_clock()

    def summaries(self) -> list[NodeSummary]:
        """Return the summary of every node; all ranks call this."""
        return list(_summaries(self._group, self.plan, self.history))

    def record(self, started: float, nodes: Sequence[NodeSummary] | None = None, **fields: Any) -> TrainRecord:
        """Return the record of the run; all ranks call this.

        Args:
            started: when the command was given, in seconds since the epoch.
            nodes: `summaries()`, if they are known already.
            fields: of the record that only the front end knows.
        """
        self.history.wall_seconds = seconds = self.seconds
        known: dict[str, Any] = {
            "plan": self.plan,
            "seconds": seconds,
            "startup_seconds": max(0.0, time.time() - seconds - started),
            "environment": environment(),
        }
        self.history.events[:0] = left_out(self.plan)
        return self.history.record(self.summaries() if nodes is None else nodes, **(known | fields))


def left_out(plan: Plan) -> list[Event]:
    """Return events for nodes and strategies that the plan rejected."""
    return [
        Event(
            step=0,
            kind="left out",
            message=f"{r.what}: {r.reason}",
            nodes=(r.what,) if r.is_node else (),
        )
        for r in plan.rejected
    ]


def _summaries(group: Group, plan: Plan, history: History) -> Iterator[NodeSummary]:
    """Yield the summary of every node, from the history and each rank's counts; all ranks call this."""
    works = list(history.totals.values())
    samples = sum(entry.samples for entry in history.steps())
    counts = [group.traffic.sent_bytes, group.traffic.received_bytes, peak_memory(str(group.device))]
    gathered = [decode_json(row) for row in group.all_gather_bytes(msgspec.json.encode(counts))]
    rows = dict(zip(group.nodes, gathered, strict=True))
    for work, assignment in zip(works, plan.assignments, strict=True):
        sent, received, peak = rows.get(assignment.node, (0, 0, 0))  # unknown for a lost node
        yield NodeSummary(
            name=assignment.node,
            device=assignment.device,
            share=assignment.share * work.samples / samples if samples else 0.0,
            seconds_computing=work.busy_seconds,
            seconds_waiting=work.wait_seconds or 0.0,
            bytes_sent=sent,
            bytes_received=received,
            peak_memory_bytes=peak,
        )
