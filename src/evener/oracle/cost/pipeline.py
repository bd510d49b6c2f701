"""Prices pipelines, one or several in parallel: every step is simulated, pass by pass.

`oracle.stages` cuts a model exactly into consecutive stages on a row of devices, over units of one or several layers.
The shortest neighbouring layers are merged until the number of units is small enough to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from evener.oracle.apportion import NodeCost, apportion
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostEstimate, CostModel, ranks_of
from evener.oracle.cost.replica import ReplicaCost
from evener.oracle.cost.step_breakdown import StepBreakdown
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.oracle.schedule import (
    SCHEDULES,
    ScheduleName,
    SimulatedStep,
    candidates,
    is_worth_more,
    max_held,
    simulate,
)
from evener.oracle.stages import DeviceGroup, Held, StageCut, Units, best_cut
from evener.records.errors import DoesNotFit

_MAX_FREE_ORDER = 5
STAGE_BOTTLENECKS = {
    "compute_seconds": "computing of the slowest stage",
    "stages": "sending activations from stage to stage",
    "idle": "bubbles: stages wait while the first micro-batches arrive and the last ones leave",
}
"""Phrases for what takes longest in a pipeline."""


@dataclass(frozen=True, kw_only=True)
class PipelineReplica:
    """One replica of the model, cut into stages.

    Attributes:
        schedule: order of the passes.
        order: index of the device that computes each stage.
        starts: number of the first layer of every stage.
        timeline: the simulated step.
        transfer: seconds of a message from every stage to the next one, for one micro-batch.
        parameter_bytes: parameters of every stage.
        memory_bytes: peak memory of every stage.
        sent_bytes: bytes per step of the stage that sends most.
    """

    schedule: ScheduleName
    order: tuple[int, ...]
    starts: tuple[int, ...]
    timeline: SimulatedStep
    transfer: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    sent_bytes: float


def make_pipeline(
    model: CostModel, devices: Sequence[int], samples: int, micro_batches: int, teams: Sequence[ReplicaCost] = ()
) -> PipelineReplica:
    """Return the fastest pipeline on `devices` for micro-batches of `samples`.

    Stages recompute only if memory requires it. If the job leaves the schedule open, it is the fastest one that fits
    the memory without another cut and without recomputing.

    Args:
        model: the job and the machines.
        devices: one a stage.
        samples: samples of a micro-batch.
        micro_batches: micro-batches of a step.
        teams: for each of `devices`, the team that divides its stage's layers; empty if each stage has one device.

    Raises:
        DoesNotFit: no cut of the model fits the devices, even with recomputation.
    """
    stages, group = len(devices), _group(model, devices, teams)
    first, *others = candidates(model.job.schedule, are_divided=bool(teams))
    waiting = _waiting(first, stages, micro_batches)
    for recomputes in (False, True):
        load = _load(model, devices, samples, recomputes, teams)
        held = Held(waiting=waiting, kept=(1,) * stages if recomputes else waiting)
        cut = best_cut(_units(load, model.units), group, held, stages)
        if cut is None:
            continue
        best = _simulated(model, devices, load, held, cut, first, micro_batches, recomputes=recomputes)
        for schedule in () if recomputes else others:
            more = _waiting(schedule, stages, micro_batches)
            line = _simulated(model, devices, load, Held(waiting=more, kept=more), cut, schedule, micro_batches)
            fits = all(n <= group.memory[d] for n, d in zip(line.memory_bytes, line.order, strict=True))
            if fits and is_worth_more(line.timeline.seconds, best.timeline.seconds):
                best = line
        return best
    raise DoesNotFit(f"no division of the model into {stages} stages fits the devices' memory")


@lru_cache(maxsize=256)
def _waiting(schedule: ScheduleName, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the largest number of micro-batches that every stage holds at once."""
    return tuple(max_held(SCHEDULES[schedule](k, stages, micro_batches)) for k in range(stages))


@dataclass(frozen=True)
class _Load:
    """The cost of one micro-batch: seconds of every layer on every device, bytes of every layer.

    Attributes:
        forward, backward: seconds, [devices, layers].
        state: bytes of parameters, gradients and optimizer state; for a team, on the rank that has most of them.
        parameters: bytes of parameters; for a team, on the rank that has most of them.
        kept: bytes that backward needs.
        boundary: bytes that cross the cut behind the layer.
    """

    forward: Numbers
    backward: Numbers
    state: Numbers
    parameters: Numbers
    kept: Numbers
    boundary: Numbers


def _load(
    model: CostModel, devices: Sequence[int], samples: int, recomputes: bool, teams: Sequence[ReplicaCost]
) -> _Load:
    layers = model.layers
    passes = [team.passes(samples)[:, None] for team in teams] or [model.seconds(d).of(samples) for d in devices]
    forward, backward = np.concatenate(passes, axis=1)
    largest = np.max([team.gradient_bytes for team in teams] or [layers.weight_bytes], axis=0)
    part = largest / np.maximum(layers.weight_bytes, 1.0)
    return _Load(
        forward=forward,
        backward=backward + forward * recomputes,
        state=model.layer_state_bytes * part,
        parameters=largest,
        kept=samples * layers.kept_bytes,
        boundary=samples * layers.boundary_bytes,
    )


def _units(load: _Load, starts: Sequence[int]) -> Units:
    """Return the units between possible cuts: the layers from each of `starts` to the next."""
    ends = [*starts[1:], len(load.state)]
    return Units(
        seconds=np.add.reduceat(load.forward + load.backward, starts, axis=1).T,
        weight_bytes=np.add.reduceat(load.state, starts),
        kept_bytes=np.add.reduceat(load.kept, starts),
        boundary_bytes=load.boundary[np.array(ends) - 1],
    )


def _simulated(
    model: CostModel,
    devices: Sequence[int],
    load: _Load,
    held: Held,
    cut: StageCut,
    schedule: ScheduleName,
    micro_batches: int,
    *,
    recomputes: bool = False,
) -> PipelineReplica:
    """Return the pipeline with this cut and schedule, with its step simulated."""
    starts_of_units = [*model.units, len(load.state)]
    ends = [starts_of_units[end] for end in cut.ends]
    spans = [slice(a, b) for a, b in pairwise([0, *ends])]
    crossing = [0.0, *(float(load.boundary[end - 1]) for end in ends[:-1]), 0.0]
    hops = [model.topology.chain((devices[a], devices[b])) for a, b in pairwise(cut.devices)]
    transfer = tuple(hop.seconds(nbytes) for hop, nbytes in zip(hops, crossing[1:], strict=False))
    timeline = simulate(
        [float(load.forward[d, span].sum()) for d, span in zip(cut.devices, spans, strict=True)],
        [float(load.backward[d, span].sum()) for d, span in zip(cut.devices, spans, strict=True)],
        micro_batches,
        schedule,
        transfer,
        recomputes=recomputes,
    )
    return PipelineReplica(
        schedule=schedule,
        order=cut.devices,
        starts=tuple(span.start for span in spans),
        timeline=timeline,
        transfer=transfer,
        parameter_bytes=tuple(float(load.parameters[span].sum()) for span in spans),
        memory_bytes=tuple(
            round(load.state[span].sum() + load.kept[span].sum() * held.kept[k] + crossing[k] * held.waiting[k])
            for k, span in enumerate(spans)
        ),
        sent_bytes=micro_batches * max(a + b for a, b in pairwise(crossing)),
    )


def _group(model: CostModel, devices: Sequence[int], teams: Sequence[ReplicaCost]) -> DeviceGroup:
    """Return the devices for `oracle.stages`; only few devices may change their order."""
    size = len(devices)
    in_order = size > _MAX_FREE_ORDER
    pairs = {
        (i, j): model.topology.chain((devices[i], devices[j]))
        for i in range(size)
        for j in range(size)
        if (abs(i - j) == 1 if in_order else i != j)
    }
    return DeviceGroup(
        memory=tuple(
            min(float(model.device(device).memory_bytes) for device in team)
            for team in ([team.devices for team in teams] or [(device,) for device in devices])
        ),
        alpha=tuple(tuple(pairs[i, j].alpha if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        beta=tuple(tuple(pairs[i, j].beta if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        in_order=in_order,
    )


def price_pipeline(model: CostModel, rows: Sequence[Sequence[int]], micro_batches: int) -> CostEstimate:
    """Return the cost of a step of one pipeline per row of devices, with `micro_batches` micro-batches each.

    Raises:
        DoesNotFit: no cut of the model fits the memory of a row of devices.
    """
    micro = -(-model.job.batch_size // micro_batches)
    sizes = apportion(micro, [_worker(model, row) for row in rows])
    pipelines = _pipelines(model, rows, sizes, micro_batches)
    ranks = ranks_of([[row[i] for i in pipeline.order] for pipeline, row in zip(pipelines, rows, strict=True)], sizes)
    slowest = max(pipelines, key=lambda pipeline: pipeline.timeline.seconds)
    parameters = [nbytes for pipeline in pipelines for nbytes in pipeline.parameter_bytes]
    update = max(model.update_seconds(*pair) for pair in zip(ranks["devices"], parameters, strict=True))
    stretch, busiest, sending = model.stretch(ranks["devices"]), max(slowest.timeline.busy), 2 * sum(slowest.transfer)
    gradients, gradient_bytes = _gradient_exchange(model, rows, slowest)
    parts = StepBreakdown(
        computing=busiest * stretch,
        update=update * stretch,
        stages=sending,
        gradients=gradients,
        idle=max(0.0, slowest.timeline.seconds - busiest - sending),
    )
    return CostEstimate(
        strategy="pipeline" if len(rows) == 1 else "data+pipeline",
        shares=tuple(busy / sum(pipeline.timeline.busy) for pipeline in pipelines for busy in pipeline.timeline.busy),
        accumulate=micro_batches,
        stages=slowest.starts,
        schedule=slowest.schedule,
        parts=parts,
        sent_bytes=round(max(pipeline.sent_bytes for pipeline in pipelines) + gradient_bytes),
        memory_bytes=tuple(nbytes for pipeline in pipelines for nbytes in pipeline.memory_bytes),
        bottleneck=parts.longest({**STAGE_BOTTLENECKS, "gradients": "the all-reduce of gradients"}),
        **ranks,
    )


def _worker(model: CostModel, row: Sequence[int]) -> NodeCost:
    """Return a worker that is as fast as the devices of a row together."""
    return NodeCost(unit_seconds=1 / sum(1 / model.workers[device].unit_seconds for device in row))


def _pipelines(
    model: CostModel, rows: Sequence[Sequence[int]], sizes: Sequence[int], micro_batches: int
) -> list[PipelineReplica]:
    """Return the pipeline of every row; rows with the same kinds of devices and number of samples have the same cut."""
    known: dict[tuple[tuple[int, ...], int], PipelineReplica] = {}
    pipelines = []
    for row, samples in zip(rows, sizes, strict=True):
        key = (tuple(model.kinds[device] for device in row), samples)
        if key not in known:
            known[key] = make_pipeline(model, row, samples, micro_batches)
        pipelines.append(known[key])
    return pipelines


def _gradient_exchange(
    model: CostModel, rows: Sequence[Sequence[int]], slowest: PipelineReplica
) -> tuple[float, float]:
    """Return (seconds, bytes sent) of all stages' gradient all-reduces; each begins when its stage has finished."""
    if len(rows) < 2:
        return 0.0, 0.0
    stages = range(len(slowest.parameter_bytes))
    channel = model.topology.ring(*([row[slowest.order[k]] for row in rows] for k in stages))
    ends = [passes[-1][2] for passes in slowest.timeline.passes]
    exchanges = [all_reduce_seconds(n, len(rows), channel.alpha, channel.beta) for n in slowest.parameter_bytes]
    over = max(end + seconds for end, seconds in zip(ends, exchanges, strict=True)) - slowest.timeline.seconds
    return over, ring_bytes(round(max(slowest.parameter_bytes)), len(rows))
