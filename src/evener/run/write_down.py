"""Makes the record of a run from the loop's history and every rank's own counts."""

from __future__ import annotations

import resource

import msgspec
import torch

from evener.benchmark.device import environment
from evener.plan import Plan
from evener.record import Event, NodeSummary, TrainRecord
from evener.run.history import History
from evener.run.running import Run


def write_down(run: Run, history: History, startup: float) -> TrainRecord:
    """The record of a run; its nodes' figures are gathered from all ranks."""
    group, entries = run.group, history.log.entries
    own = [group.traffic.sent_bytes, group.traffic.received_bytes, _peak_memory(group.device)]
    rows = [msgspec.json.decode(row) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    samples = sum(entry.samples for entry in entries)
    nodes = []
    for i, (assignment, (sent, received, peak)) in enumerate(zip(run.plan.assignments, rows, strict=True)):
        steps = [entry.nodes[i] for entry in entries]
        nodes.append(
            NodeSummary(
                name=assignment.node,
                device=assignment.device,
                share=assignment.share * sum(step.samples for step in steps) / samples if samples else 0.0,
                seconds_computing=sum(s.io_seconds + s.compute_seconds + s.update_seconds for s in steps),
                seconds_waiting=sum(step.wait_seconds for step in steps),
                bytes_sent=sent,
                bytes_received=received,
                peak_memory_bytes=peak,
            )
        )
    last = [e for e in entries if e.epoch == entries[-1].epoch] if entries else []
    return TrainRecord(
        task=run.task.name,
        plan=run.plan,
        seed=run.settings.seed,
        epochs=run.settings.epochs,
        precision=run.settings.precision,
        seconds=history.seconds,
        samples_per_second=samples / history.train_seconds if history.train_seconds else 0.0,
        final_loss=sum(e.loss * e.samples for e in last) / sum(e.samples for e in last) if last else None,
        validation_accuracy=history.validations[-1].accuracy if history.validations else None,
        startup_seconds=startup,
        every=history.log.every,
        steps=entries,
        validations=tuple(history.validations),
        events=(*_left_out(run.plan), *history.events),
        nodes=tuple(nodes),
        environment=environment(),
    )


def _left_out(plan: Plan) -> list[Event]:
    return [Event(step=0, kind="left out", message=f"{r.what}: {r.reason}") for r in plan.rejected]


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
