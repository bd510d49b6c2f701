"""What a run leaves behind: its record, its weights, and the timeline of a pipeline."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from evener.atomic import atomic_write
from evener.benchmark.device import environment
from evener.errors import MissingExtra
from evener.parallel.pipeline.staged import StagedModel
from evener.plan import Plan
from evener.record import Event, NodeSummary, Step, TrainRecord
from evener.report.canvas import png
from evener.report.timeline import timeline_figure
from evener.run.checkpoint import save_weights
from evener.run.history import History
from evener.run.training import Training


def write_results(training: Training, history: History, startup: float) -> None:
    """Write weights and timeline into the run's folder, and emit the record; every rank calls this.

    Args:
        training: that has ended.
        history: of it.
        startup: seconds before its first step.
    """
    folder = training.context.config.folder
    record = build_record(training, history, startup)
    if isinstance(training.model, StagedModel):
        write_timeline(training.model, folder)
    weights = training.model.gather_weights()
    if training.group.is_leader:
        save_weights(weights, folder / "model.safetensors")
        training.context.env.notify(record)


def build_record(training: Training, history: History, startup: float) -> TrainRecord:
    """The record of a run; its nodes' figures are gathered from all ranks."""
    context, plan, entries = training.context, training.plan, history.log.entries
    samples = sum(entry.samples for entry in entries)
    last = [e for e in entries if e.epoch == entries[-1].epoch] if entries else []
    return TrainRecord(
        task=context.task.name,
        plan=plan,
        seed=context.config.seed,
        epochs=context.epochs,
        precision=context.config.precision,
        seconds=history.seconds,
        samples_per_second=samples / history.train_seconds if history.train_seconds else 0.0,
        final_loss=sum(e.loss * e.samples for e in last) / sum(e.samples for e in last) if last else None,
        validation_accuracy=history.validations[-1].accuracy if history.validations else None,
        startup_seconds=startup,
        every=history.log.every,
        steps=entries,
        validations=tuple(history.validations),
        events=(*_left_out(plan), *history.events),
        nodes=tuple(_node_summaries(training, entries)),
        environment=environment(),
    )


def _node_summaries(training: Training, entries: Sequence[Step]) -> Iterator[NodeSummary]:
    """What every node did, from the steps that all know and from each rank's own counts."""
    group, samples = training.group, sum(entry.samples for entry in entries)
    own = [group.traffic.sent_bytes, group.traffic.received_bytes, _peak_memory(group.device)]
    rows = [msgspec.json.decode(row) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    for i, (assignment, (sent, received, peak)) in enumerate(zip(training.plan.assignments, rows, strict=True)):
        steps = [entry.nodes[i] for entry in entries]
        yield NodeSummary(
            name=assignment.node,
            device=assignment.device,
            share=assignment.share * sum(step.samples for step in steps) / samples if samples else 0.0,
            seconds_computing=sum(s.io_seconds + s.compute_seconds + s.update_seconds for s in steps),
            seconds_waiting=sum(step.wait_seconds for step in steps),
            bytes_sent=sent,
            bytes_received=received,
            peak_memory_bytes=peak,
        )


def _left_out(plan: Plan) -> list[Event]:
    return [Event(step=0, kind="left out", message=f"{r.what}: {r.reason}") for r in plan.rejected]


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_timeline(model: StagedModel, folder: Path) -> None:
    """Write the last step as `timeline.json` (for ui.perfetto.dev) and, with Matplotlib, `timeline.png`."""
    timeline = model.pipeline.timeline()
    if not model.group.is_leader:
        return
    atomic_write(folder / "timeline.json", timeline.chrome_trace())
    try:
        figure = timeline_figure(timeline)
    except MissingExtra:  # the trace shows the same
        return
    atomic_write(folder / "timeline.png", png(figure))
