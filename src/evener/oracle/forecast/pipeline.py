"""Prices pipelines, one or several side by side: every step is simulated, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

from evener.oracle.apportion import Worker, apportion
from evener.oracle.communication import all_reduce_seconds, ring_bytes
from evener.oracle.forecast.grid import slowest_of_many
from evener.oracle.forecast.line import Line, make_line
from evener.oracle.forecast.quote import Quote, worst_of
from evener.oracle.forecast.scenario import Scenario


def price_pipeline(scenario: Scenario, rows: Sequence[Sequence[int]], micro_batches: int) -> Quote:
    """What a step costs that flows through `rows` of devices, in `micro_batches` micro-batches each.

    Raises:
        DoesNotFit: no cut of the model fits the memory of a row of devices.
    """
    micro = -(-scenario.job.batch_size // micro_batches)
    sizes = apportion(micro, [_worker(scenario, row) for row in rows])
    lines = _lines(scenario, rows, sizes, micro_batches)
    devices = [row[i] for line, row in zip(lines, rows, strict=True) for i in line.order]
    slowest = max(lines, key=lambda line: line.timeline.seconds)
    parameters = [nbytes for line in lines for nbytes in line.parameter_bytes]
    update = max(scenario.update_seconds(*pair) for pair in zip(devices, parameters, strict=True))
    computing = (max(slowest.timeline.busy) + update) * slowest_of_many(scenario, devices)
    sending = 2 * sum(slowest.transfer)
    waiting = max(0.0, slowest.timeline.seconds - max(slowest.timeline.busy) - sending)
    gradients, gradient_bytes = _gradient_exchange(scenario, rows, slowest)
    return Quote(
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


def _worker(scenario: Scenario, row: Sequence[int]) -> Worker:
    """A row as fast as its devices together."""
    return Worker(unit_seconds=1 / sum(1 / scenario.workers[device].unit_seconds for device in row))


def _lines(scenario: Scenario, rows: Sequence[Sequence[int]], sizes: Sequence[int], micro_batches: int) -> list[Line]:
    """The pipeline of every row; rows of the same kinds of devices with as many samples are cut alike."""
    known: dict[tuple[tuple[int, ...], int], Line] = {}
    lines = []
    for row, samples in zip(rows, sizes, strict=True):
        key = (tuple(scenario.kinds[device] for device in row), samples)
        if key not in known:
            known[key] = make_line(scenario, row, samples, micro_batches)
        lines.append(known[key])
    return lines


def _gradient_exchange(scenario: Scenario, rows: Sequence[Sequence[int]], slowest: Line) -> tuple[float, float]:
    """(seconds, bytes sent) of the all-reduces of all stages' gradients: each begins when its stage is done."""
    if len(rows) < 2:
        return 0.0, 0.0
    stages = range(len(slowest.parameter_bytes))
    channel = scenario.topology.ring(*([row[slowest.order[k]] for row in rows] for k in stages))
    ends = [passes[-1][2] for passes in slowest.timeline.passes]
    exchanges = [all_reduce_seconds(n, len(rows), channel.alpha, channel.beta) for n in slowest.parameter_bytes]
    over = max(end + seconds for end, seconds in zip(ends, exchanges, strict=True)) - slowest.timeline.seconds
    return over, ring_bytes(round(max(slowest.parameter_bytes)), len(rows))
