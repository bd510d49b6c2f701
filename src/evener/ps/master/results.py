"""The plan and the record of a run, made from its history and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.oracle.apportion import Worker, apportion
from evener.ps.master.nodes import NodeRecord
from evener.ps.protocol.job import Job
from evener.records.history import History
from evener.records.plan import Assignment, Plan
from evener.records.record import NodeSummary, TrainRecord
from evener.sync.messages import WorkerTotals
from evener.sync.worker_record import WorkerRecord


def plan_of(job: Job, names: Sequence[str], nodes: Mapping[str, NodeRecord], costs: Mapping[str, Worker]) -> Plan:
    """Return the division of a batch among the nodes; absent `names` get no samples, unless all are absent."""
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
        return "is not connected"
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
    """Return the record of a run in which at least one node has taken part."""
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
