"""What remains of a run: its record, made of history and nodes, and its weights by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save

from evener.atomic import atomic_write
from evener.error_kind import ErrorKind
from evener.errors import EvenerError, MissingFile
from evener.history import History
from evener.oracle.apportion import Worker, apportion
from evener.plan import Assignment, Plan
from evener.ps.job import Job
from evener.ps.nodes import NodeRecord
from evener.record import NodeSummary, TrainRecord
from evener.schema import NOT_DECODED
from evener.sync.layout import Flat
from evener.sync.messages import WorkerTotals
from evener.sync.worker_record import WorkerRecord

_WEIGHTS, _RECORD, _END = "model.safetensors", "record.json", "end.json"


def plan_of(job: Job, names: Sequence[str], nodes: Mapping[str, NodeRecord], costs: Mapping[str, Worker]) -> Plan:
    """How a batch is divided among the nodes; those of `names` that are not there get nothing, unless nobody is."""
    timed, costs = costs, costs or dict.fromkeys(names, Worker(unit_seconds=1.0))
    present = [name for name in names if name in costs]
    sizes = dict(zip(present, apportion(job.agreement.batch, [costs[name] for name in present]), strict=True))
    return Plan(
        strategy="data",
        batch_size=job.agreement.batch,
        assignments=tuple(
            Assignment(
                rank=rank,
                node=name,
                device=nodes[name].device if name in nodes else "",
                samples=sizes.get(name, 0),
                sample_seconds=timed[name].unit_seconds if name in timed else 0.0,
                reason=_reason(name, costs),
            )
            for rank, name in enumerate(names)
        ),
    )


def _reason(name: str, costs: Mapping[str, Worker]) -> str:
    if name not in costs:
        return "is not there"
    fastest = min(cost.unit_seconds for cost in costs.values())
    return f"{fastest / costs[name].unit_seconds:.0%} of the fastest node's speed"


def record_of(
    job: Job,
    history: History,
    nodes: Mapping[str, NodeRecord],
    costs: Mapping[str, Worker],
    workers: Mapping[str, WorkerRecord],
    *,
    seconds: float,
    startup: float,
    environment: dict[str, str],
) -> TrainRecord:
    """The record of a run; at least one node has had a part in it."""
    return history.record(
        [_summary(name, nodes.get(name), workers.get(name), history) for name in history.names],
        task=job.title,
        plan=plan_of(job, history.names, nodes, costs),
        seed=job.workload.seed,
        epochs=job.workload.num_epochs or 0,
        precision=job.precision,
        seconds=seconds,
        startup_seconds=startup,
        environment=environment,
        agreement=job.protocol,
    )


def _summary(name: str, node: NodeRecord | None, worker: WorkerRecord | None, history: History) -> NodeSummary:
    work, samples = history.totals[name], sum(work.samples for work in history.totals.values())
    totals = worker.totals if worker is not None else WorkerTotals()
    return NodeSummary(
        name=name,
        device=node.device if node else "",
        share=work.samples / samples if samples else 0.0,
        seconds_computing=work.busy_seconds,
        seconds_waiting=max(0.0, history.seconds - history.since[name] - work.busy_seconds),
        bytes_sent=work.sent,
        bytes_received=work.received,
        peak_memory_bytes=node.peak_memory_bytes if node else 0,
        contributions=totals.applied,
        refused=totals.refused,
        late=totals.late,
        staleness=totals.staleness / totals.applied if totals.applied else 0.0,
        most_stale=totals.most_stale,
        clipped=totals.clipped,
    )


class RunResult(NamedTuple):
    """How a run ended.

    Attributes:
        kind: of the error that ended it; None if it was completed.
        reason: the error's sentence.
        record: as JSON; empty if nobody ever worked for it.
        weights: a safetensors file; likewise.
    """

    kind: ErrorKind | None
    reason: str
    record: bytes
    weights: bytes

    @property
    def error(self) -> EvenerError | None:
        """Why it ended before it was completed; None if it was."""
        return None if self.kind is None else self.kind.as_error(self.reason)


def encode_record(record: TrainRecord) -> bytes:
    """As it travels and lies on the disk."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def weights_of(weights: Flat) -> bytes:
    """A safetensors file of the weights, each by its name."""
    return save({name: np.ascontiguousarray(array) for name, array in weights.views().items()})


def save_result(folder: Path, result: RunResult) -> None:
    """Write what remains of a run into its folder, for this user only. Raises OSError."""
    for name, data in (
        (_WEIGHTS, result.weights),
        (_RECORD, result.record),
        (_END, msgspec.json.encode((result.kind, result.reason))),
    ):
        atomic_write(folder / name, data, private=True)


def load_result(folder: Path) -> RunResult:
    """What remains of the run in `folder`.

    Raises:
        MissingFile: there was no such run, or it has not ended.
    """
    try:
        kind, reason = msgspec.json.decode((folder / _END).read_bytes(), type=tuple[ErrorKind | None, str])
        return RunResult(kind, reason, (folder / _RECORD).read_bytes(), (folder / _WEIGHTS).read_bytes())
    except (OSError, *NOT_DECODED) as error:
        raise MissingFile(f"no result lies in {folder}") from error
