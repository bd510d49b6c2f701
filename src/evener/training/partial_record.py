"""The record of a run that ended early, from the events that were shown, as its nodes may be gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.config.run_config import RunConfig
from evener.data.tasks.load import is_path
from evener.records.history import History
from evener.records.plan import Plan
from evener.records.record import Event, NodeSummary, TrainRecord, Validation
from evener.report.live.live_run import LiveRun
from evener.system.host import environment


class RunRequest(NamedTuple):
    """The request for a run, for its record; see `TrainRecord`.

    Attributes:
        events: shown before the run starts.
        file: that defines the task, without its folder; empty for a built-in task.
    """

    task: str
    seed: int = 0
    precision: str = "fp32"
    usual: str = ""
    options: dict[str, str] = {}
    events: tuple[Event, ...] = ()
    file: str = ""


def request_of(config: RunConfig) -> RunRequest:
    """Return the request of `config`, for the record of a run that ends early."""
    path = Path(config.task)
    file = path.name if is_path(config.task) else ""
    return RunRequest(path.stem, config.seed, config.precision, config.usual, config.dividing_options, file=file)


def partial_record(
    live: LiveRun, plan: Plan, request: RunRequest, *, ending: str, startup: float, seconds: float
) -> TrainRecord:
    """Return the record of a run that ended with the sentence `ending`, from the events that were shown.

    Received bytes and peak memory are unknown: 0.

    Args:
        live: the shown events.
        plan: the last one.
        request: of the run.
        ending: how it ended.
        startup: seconds before its first step.
        seconds: since then.
    """
    events = [one for _, one in live.log]
    history = msgspec.structs.replace(
        live.history,
        events=[one for one in events if isinstance(one, Event)],
        validations=[one for one in events if isinstance(one, Validation)],
    )
    return history.record(
        list(_nodes(history, plan)),
        task=request.task,
        plan=plan,
        seed=request.seed,
        epochs=live.epochs,
        precision=request.precision,
        seconds=seconds,
        startup_seconds=startup,
        environment=environment(),
        ending=ending,
    )


def _nodes(history: History, plan: Plan) -> Iterator[NodeSummary]:
    devices = {one.node: one.device for one in plan.assignments}
    samples = sum(work.samples for work in history.totals.values())
    for name, work in history.totals.items():
        yield NodeSummary(
            name=name,
            device=devices.get(name, ""),
            share=work.samples / samples if samples else 0.0,
            seconds_computing=work.busy_seconds,
            seconds_waiting=work.wait_seconds or 0.0,
            bytes_sent=work.sent,
            bytes_received=0,
            peak_memory_bytes=0,
        )
