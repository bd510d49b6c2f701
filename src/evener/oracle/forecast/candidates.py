"""What is worth pricing: sets of devices, meshes of groups, pipelines; pruned, because there are too many of them.

    sets of devices    the k fastest, k = 1, 2, 4 ... all; then halfway between the best k and its neighbours
    meshes             groups of 2, 4 and 8 neighbours, and the devices of each node
    pipelines          2, 4 and 8 times as many micro-batches as stages; of many stages, or rows of them, 4 times
    local steps        as few as make their exchange a tenth of the computing

Every division inside of a candidate (samples, filters, rows, layers) is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil

from evener.oracle.communication import all_reduce_seconds
from evener.oracle.forecast.divide import MODES
from evener.oracle.forecast.grid import price_grid
from evener.oracle.forecast.pipeline import price_pipeline
from evener.oracle.forecast.quote import Quote
from evener.oracle.forecast.replication import price_averaging, price_server
from evener.oracle.forecast.scenario import Scenario
from evener.plan import Strategy

_GROUP_SIZES = (2, 4, 8)
_MOST_MEMBERS = 64
_MOST_STAGES = 64
_FEW_STAGES = 8
_MOST_LOCAL_STEPS = 500

Price = Callable[[], Quote]


def priced(scenario: Scenario, strategy: Strategy, devices: Sequence[int]) -> Iterator[Price]:
    """What there is to price of `strategy` on exactly `devices`, each as a function that does it."""
    job, size = scenario.job, len(devices)
    row = scenario.topology.ordered(devices)
    if strategy == "serial":
        if size == 1:
            yield lambda: price_grid(scenario, [row], "none")
    elif size < 2:
        return
    elif strategy == "data":
        yield lambda: price_grid(scenario, [[device] for device in row], "none")
    elif strategy == "averaging":
        yield lambda: price_averaging(scenario, row, _local_steps(scenario, row))
    elif strategy in ("server", "asynchronous server"):
        yield lambda: price_server(scenario, row, row[0], asynchronous=strategy != "server")
    elif strategy == "pipeline":
        if size <= min(_MOST_STAGES, len(job.graph.layers)):
            yield from _pipelines(scenario, [row])
    elif strategy == "data+pipeline":
        for groups in meshes(scenario, row):
            if len({len(group) for group in groups}) == 1:
                yield from _pipelines(scenario, groups)
    else:
        yield from _divided(scenario, strategy, row)


def _divided(scenario: Scenario, strategy: Strategy, row: Sequence[int]) -> Iterator[Price]:
    mode = next(mode for mode in MODES if strategy.endswith(mode))
    if not strategy.startswith("data+"):
        if len(row) <= _MOST_MEMBERS:
            yield lambda: price_grid(scenario, [row], mode)
        return
    for groups in meshes(scenario, row):
        yield lambda groups=groups: price_grid(scenario, groups, mode)  # type: ignore[misc]


def _pipelines(scenario: Scenario, rows: Sequence[Sequence[int]]) -> Iterator[Price]:
    for times in (2, 4, 8) if len(rows) == 1 and len(rows[0]) <= _FEW_STAGES else (4,):
        micro_batches = times * len(rows[0])
        if micro_batches * len(rows) <= scenario.job.batch_size:
            yield lambda m=micro_batches: price_pipeline(scenario, rows, m)  # type: ignore[misc]


def meshes(scenario: Scenario, row: Sequence[int]) -> Iterator[list[list[int]]]:
    """Divisions of `row` into at least two groups of several neighbours."""
    seen: set[tuple[int, ...]] = set()
    by_node = [list(group) for _, group in groupby(row, key=lambda device: scenario.topology.nodes[device])]
    chunks = ([list(row[i : i + m]) for i in range(0, len(row), m)] for m in _GROUP_SIZES if len(row) % m == 0)
    for groups in (by_node, *chunks):
        sizes = tuple(map(len, groups))
        if len(groups) > 1 and min(sizes) > 1 and sizes not in seen:
            seen.add(sizes)
            yield groups


def _local_steps(scenario: Scenario, devices: Sequence[int]) -> int:
    """As few local steps as make the averaging a tenth of the computing, at least 2."""
    nbytes, channel = scenario.parameter_bytes, scenario.topology.ring(devices)
    exchange = all_reduce_seconds(nbytes, len(devices), channel.alpha, channel.beta)
    each = scenario.job.batch_size / sum(1 / scenario.workers[device].unit_seconds for device in devices)
    return min(_MOST_LOCAL_STEPS, max(2, ceil(10 * exchange / each)))
