"""Prices pipelines, one or several side by side: every step is simulated, pass by pass.

A model is cut into consecutive stages on a row of devices by `oracle.stages`, exactly, over units of one or several
layers: neighbours that take least time are put together until few enough are left to search through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evener.errors import DoesNotFit
from evener.oracle.apportion import Worker, apportion
from evener.oracle.cost.estimate import CostEstimate, worst_of
from evener.oracle.cost.layers import Layers, Numbers
from evener.oracle.cost.mesh import slowest_of_many
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.oracle.schedule import SCHEDULES, SimulatedStep, max_held, simulate
from evener.oracle.stages import DeviceGroup, Held, Unit, divide

_FREE_ORDER_UP_TO = 5


@dataclass(frozen=True, kw_only=True)
class PipelineReplica:
    """One replica of the model, cut into stages.

    Attributes:
        order: which of the devices that were given computes each stage.
        starts: number of the first layer of every stage.
        timeline: of its step.
        transfer: seconds of a message from every stage to the next one, for one micro-batch.
        parameter_bytes: of every stage.
        memory_bytes: of every stage, at its peak.
        sent_bytes: of the stage that sends most, in a step.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    timeline: SimulatedStep
    transfer: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    sent_bytes: float


def make_line(model: CostModel, devices: Sequence[int], samples: int, micro_batches: int) -> PipelineReplica:
    """The fastest pipeline on `devices` for micro-batches of `samples`; stages recompute only if they have to.

    Raises:
        DoesNotFit: no cut of the model fits the devices, not even if stages recompute.
    """
    try:
        return _line(model, devices, samples, micro_batches, recomputes=False)
    except DoesNotFit:
        return _line(model, devices, samples, micro_batches, recomputes=True)


def boundary_bytes(layers: Layers) -> Numbers:
    """Bytes of one sample that live across the cut behind every layer: outputs that later layers read."""
    place = {layer.name: index for index, layer in enumerate(layers.graph.layers)}
    last_reader = np.arange(len(layers))
    for index, layer in enumerate(layers.graph.layers):
        for name in layer.inputs:
            last_reader[place[name]] = index
    crossing = np.zeros(len(layers) + 1)
    np.add.at(crossing, np.arange(len(layers)), layers.output_bytes)
    np.add.at(crossing, last_reader, -layers.output_bytes)
    return np.cumsum(crossing)[:-1]


def _line(
    model: CostModel, devices: Sequence[int], samples: int, micro_batches: int, recomputes: bool
) -> PipelineReplica:
    layers, stages = model.layers, len(devices)
    seconds = [model.seconds(device) for device in devices]
    forward = np.stack([one.forward(samples) for one in seconds])
    backward = np.stack([one.backward(samples) for one in seconds]) + forward * recomputes
    boundary = samples * boundary_bytes(layers)
    starts_of_units = model.units
    waiting = tuple(max_held(SCHEDULES["1f1b"](k, stages, micro_batches)) for k in range(stages))
    kept = tuple(1 if recomputes else n for n in waiting)
    state = np.array([model.state_bytes(n) - model.job.graph.buffer_bytes for n in layers.weight_bytes])
    columns = [*(forward + backward), state, samples * layers.kept_bytes]
    sums = np.add.reduceat(np.stack(columns), starts_of_units, axis=1)
    unit_ends = [*starts_of_units[1:], len(layers)]
    units = [
        Unit(
            seconds=tuple(sums[:stages, unit]),
            weight_bytes=float(sums[-2, unit]),
            kept_bytes=float(sums[-1, unit]),
            boundary_bytes=float(boundary[end - 1]),
        )
        for unit, end in enumerate(unit_ends)
    ]
    division = divide(units, _team(model, devices), Held(waiting=waiting, kept=kept), stages=stages)
    ends = [unit_ends[end - 1] for end in division.ends]
    starts = [0, *ends[:-1]]
    ranges = list(zip(division.devices, starts, ends, strict=True))
    channels = [model.topology.chain((devices[a], devices[b])) for a, b in pairwise(division.devices)]
    transfer = tuple(
        channel.seconds(float(boundary[end - 1])) for channel, end in zip(channels, ends[:-1], strict=True)
    )
    timeline = simulate(
        [float(forward[d, a:b].sum()) for d, a, b in ranges],
        [float(backward[d, a:b].sum()) for d, a, b in ranges],
        micro_batches,
        transfer=transfer,
    )
    crossing = [0.0, *(float(boundary[end - 1]) for end in ends[:-1]), 0.0]
    return PipelineReplica(
        order=division.devices,
        starts=tuple(starts),
        timeline=timeline,
        transfer=transfer,
        parameter_bytes=tuple(float(layers.weight_bytes[a:b].sum()) for a, b in zip(starts, ends, strict=True)),
        memory_bytes=tuple(
            round(state[a:b].sum() + samples * layers.kept_bytes[a:b].sum() * kept[k] + crossing[k] * waiting[k])
            for k, (a, b) in enumerate(zip(starts, ends, strict=True))
        ),
        sent_bytes=micro_batches * max(a + b for a, b in pairwise(crossing)),
    )


def _team(model: CostModel, devices: Sequence[int]) -> DeviceGroup:
    """The devices as `oracle.stages` wants them; only a few of them may change their order."""
    size = len(devices)
    in_order = size > _FREE_ORDER_UP_TO
    pairs = {
        (i, j): model.topology.chain((devices[i], devices[j]))
        for i in range(size)
        for j in range(size)
        if (abs(i - j) == 1 if in_order else i != j)
    }
    return DeviceGroup(
        memory=tuple(float(model.device(device).memory_bytes) for device in devices),
        alpha=tuple(tuple(pairs[i, j].alpha if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        beta=tuple(tuple(pairs[i, j].beta if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        in_order=in_order,
    )


def price_pipeline(model: CostModel, rows: Sequence[Sequence[int]], micro_batches: int) -> CostEstimate:
    """What a step costs that flows through `rows` of devices, in `micro_batches` micro-batches each.

    Raises:
        DoesNotFit: no cut of the model fits the memory of a row of devices.
    """
    micro = -(-model.job.batch_size // micro_batches)
    sizes = apportion(micro, [_worker(model, row) for row in rows])
    lines = _lines(model, rows, sizes, micro_batches)
    devices = [row[i] for line, row in zip(lines, rows, strict=True) for i in line.order]
    slowest = max(lines, key=lambda line: line.timeline.seconds)
    parameters = [nbytes for line in lines for nbytes in line.parameter_bytes]
    update = max(model.update_seconds(*pair) for pair in zip(devices, parameters, strict=True))
    computing = (max(slowest.timeline.busy) + update) * slowest_of_many(model, devices)
    sending = 2 * sum(slowest.transfer)
    waiting = max(0.0, slowest.timeline.seconds - max(slowest.timeline.busy) - sending)
    gradients, gradient_bytes = _gradient_exchange(model, rows, slowest)
    return CostEstimate(
        strategy="pipeline" if len(rows) == 1 else "data+pipeline",
        devices=tuple(devices),
        replicas=tuple(index for index, row in enumerate(rows) for _ in row),
        samples=tuple(n for n, row in zip(sizes, rows, strict=True) for _ in row),
        shares=tuple(busy / sum(line.timeline.busy) for line in lines for busy in line.timeline.busy),
        accumulate=micro_batches,
        stages=slowest.starts,
        compute_seconds=computing,
        communication_seconds=sending + gradients,
        waiting_seconds=waiting,
        sent_bytes=round(max(line.sent_bytes for line in lines) + gradient_bytes),
        memory_bytes=tuple(nbytes for line in lines for nbytes in line.memory_bytes),
        bottleneck=worst_of(
            (
                (computing, "computing of the slowest stage"),
                (sending, "sending activations from stage to stage"),
                (gradients, "the all-reduce of gradients"),
                (waiting, "bubbles: stages wait while the first micro-batches arrive and the last ones leave"),
            )
        ),
    )


def _worker(model: CostModel, row: Sequence[int]) -> Worker:
    """A row as fast as its devices together."""
    return Worker(unit_seconds=1 / sum(1 / model.workers[device].unit_seconds for device in row))


def _lines(
    model: CostModel, rows: Sequence[Sequence[int]], sizes: Sequence[int], micro_batches: int
) -> list[PipelineReplica]:
    """The pipeline of every row; rows of the same kinds of devices with as many samples are cut alike."""
    known: dict[tuple[tuple[int, ...], int], PipelineReplica] = {}
    lines = []
    for row, samples in zip(rows, sizes, strict=True):
        key = (tuple(model.kinds[device] for device in row), samples)
        if key not in known:
            known[key] = make_line(model, row, samples, micro_batches)
        lines.append(known[key])
    return lines


def _gradient_exchange(
    model: CostModel, rows: Sequence[Sequence[int]], slowest: PipelineReplica
) -> tuple[float, float]:
    """(seconds, bytes sent) of the all-reduces of all stages' gradients: each begins when its stage is done."""
    if len(rows) < 2:
        return 0.0, 0.0
    stages = range(len(slowest.parameter_bytes))
    channel = model.topology.ring(*([row[slowest.order[k]] for row in rows] for k in stages))
    ends = [passes[-1][2] for passes in slowest.timeline.passes]
    exchanges = [all_reduce_seconds(n, len(rows), channel.alpha, channel.beta) for n in slowest.parameter_bytes]
    over = max(end + seconds for end, seconds in zip(ends, exchanges, strict=True)) - slowest.timeline.seconds
    return over, ring_bytes(round(max(slowest.parameter_bytes)), len(rows))
