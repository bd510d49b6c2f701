"""One pipeline: a model cut into consecutive stages on a row of devices, and what a micro-batch costs each stage.

The cut is found by `oracle.stages`, exactly, over units of one or several layers: neighbours that take least time are
put together until few enough are left to search through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evener.errors import DoesNotFit
from evener.oracle.forecast.layers import Layers, Numbers
from evener.oracle.forecast.scenario import Scenario
from evener.oracle.schedule import SCHEDULES, SimulatedStep, max_held, simulate
from evener.oracle.stages import Held, Team, Unit, divide

_FREE_ORDER_UP_TO = 5


@dataclass(frozen=True, kw_only=True)
class Line:
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


def make_line(scenario: Scenario, devices: Sequence[int], samples: int, micro_batches: int) -> Line:
    """The fastest pipeline on `devices` for micro-batches of `samples`; stages recompute only if they have to.

    Raises:
        DoesNotFit: no cut of the model fits the devices, not even if stages recompute.
    """
    try:
        return _line(scenario, devices, samples, micro_batches, recomputes=False)
    except DoesNotFit:
        return _line(scenario, devices, samples, micro_batches, recomputes=True)


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


def _line(scenario: Scenario, devices: Sequence[int], samples: int, micro_batches: int, recomputes: bool) -> Line:
    layers, stages = scenario.layers, len(devices)
    seconds = [scenario.seconds(device) for device in devices]
    forward = np.stack([one.forward(samples) for one in seconds])
    backward = np.stack([one.backward(samples) for one in seconds]) + forward * recomputes
    boundary = samples * boundary_bytes(layers)
    starts_of_units = scenario.units
    waiting = tuple(max_held(SCHEDULES["1f1b"](k, stages, micro_batches)) for k in range(stages))
    kept = tuple(1 if recomputes else n for n in waiting)
    state = np.array([scenario.state_bytes(n) - scenario.job.graph.buffer_bytes for n in layers.weight_bytes])
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
    division = divide(units, _team(scenario, devices), Held(waiting=waiting, kept=kept), stages=stages)
    ends = [unit_ends[end - 1] for end in division.ends]
    starts = [0, *ends[:-1]]
    ranges = list(zip(division.devices, starts, ends, strict=True))
    channels = [scenario.topology.chain((devices[a], devices[b])) for a, b in pairwise(division.devices)]
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
    return Line(
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


def _team(scenario: Scenario, devices: Sequence[int]) -> Team:
    """The devices as `oracle.stages` wants them; only a few of them may change their order."""
    size = len(devices)
    in_order = size > _FREE_ORDER_UP_TO
    pairs = {
        (i, j): scenario.topology.chain((devices[i], devices[j]))
        for i in range(size)
        for j in range(size)
        if (abs(i - j) == 1 if in_order else i != j)
    }
    return Team(
        memory=tuple(float(scenario.device(device).memory_bytes) for device in devices),
        alpha=tuple(tuple(pairs[i, j].alpha if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        beta=tuple(tuple(pairs[i, j].beta if (i, j) in pairs else 0.0 for j in range(size)) for i in range(size)),
        in_order=in_order,
    )
