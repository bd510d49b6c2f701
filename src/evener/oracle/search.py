"""Finds the fastest way to train: prices the candidates of every strategy and ranks them.

Candidates are pruned, because there are too many; the division of work inside a candidate is exact:

    sets of devices    the k fastest, k = 1, 2, 4 ... all; then halfway between the best k and its neighbours
    meshes             groups of 2, 4 and 8 neighbours, and the devices of each node
    pipelines          2, 4 and 8 times as many micro-batches as stages; 4 times for many stages or several pipelines
    pipelines of teams 2, 4 and 8 neighbours for every stage
    local steps        the fewest for which their exchange takes a tenth of the computing

A single device is a candidate, too, so that the search never recommends a set that is slower than its best member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil
from typing import cast, get_args

from evener.oracle.cost.mesh import price_averaging, price_mesh, price_server
from evener.oracle.cost.model import CostEstimate, CostModel
from evener.oracle.cost.pipeline import STAGE_BOTTLENECKS, PipelineReplica, make_pipeline, price_pipeline
from evener.oracle.cost.replica import ReplicaCost
from evener.oracle.cost.step_breakdown import StepBreakdown
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.rules import DivisionName, division_of
from evener.records.errors import DoesNotFit
from evener.records.plan import Rejected, Strategy, is_of_teams

_MANY_DEVICES, _VERY_MANY_DEVICES = 32, 128
_PRICED_ON_WHOLE_MODELS: frozenset[Strategy] = frozenset(("data", "averaging", "server", "asynchronous server"))
"""Strategies in which every device holds a complete model."""
ALL_STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ON_REQUEST_STRATEGIES: frozenset[Strategy] = frozenset(("averaging", "server", "asynchronous server"))
"""Strategies that do not train the same as one process; chosen only on request. (A synchronous server does train the
same, but it is a parameter server, meant for machines that come and go.)
"""
MAX_STEP_RATIO = 0.99
"""More devices must reduce a step to at most this fraction: a predicted gain below 1 % is noise."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search.

    Attributes:
        model: the cost model that was searched.
        ranked: the best estimate of every strategy that can run, fastest first.
        rejected: strategies that cannot run, and nodes that the best estimate leaves out.
        alone: the best single device's estimate; None where the job fits none.
        best: the recommended estimate: the fastest that trains the same as one process.
    """

    model: CostModel
    ranked: tuple[CostEstimate, ...]
    rejected: tuple[Rejected, ...]
    alone: CostEstimate | None
    best: CostEstimate

    def speedup(self, estimate: CostEstimate) -> float | None:
        """Return how many times as fast as the best single device the estimate is; None where the job fits none."""
        return self.alone.step_seconds / estimate.step_seconds if self.alone else None

    def alike(self, factor: float) -> list[CostEstimate]:
        """Return the other exact strategies on several devices whose steps take at most `factor` times as long."""
        return [
            one
            for one in self.ranked
            if one is not self.best and len(one.devices) > 1 and one.strategy not in ON_REQUEST_STRATEGIES
            if one.step_seconds <= factor * self.best.step_seconds
        ]


def search(model: CostModel, strategies: Collection[Strategy] = ALL_STRATEGIES) -> Ranking:
    """Return the best estimate of each of `strategies`, ranked.

    Raises:
        DoesNotFit: no strategy fits the memory of the devices, together or alone.
    """
    best_of: dict[Strategy, CostEstimate] = {}
    rejected: list[Rejected] = []
    alone = _best_alone(model)
    orders = {True: [i for i in _by_speed(model) if model.workers[i].max_units != 0], False: _by_node(model)}
    for strategy in strategies:
        if strategy == "serial":
            continue
        best, reason = _best_of(model, strategy, orders[strategy in _PRICED_ON_WHOLE_MODELS])
        if best is not None:
            best_of[strategy] = best
        elif model.size > 1:
            rejected.append(Rejected(what=strategy, reason=reason))
    if alone is not None:
        best_of["serial"] = alone
    else:
        rejected.append(Rejected(what="serial", reason="no single device holds the model and one sample"))
    ranked = tuple(sorted(best_of.values(), key=lambda estimate: estimate.step_seconds))
    exact = [estimate for estimate in ranked if estimate.strategy not in ON_REQUEST_STRATEGIES] or list(ranked)
    if not exact:
        reasons = "; ".join(f"{rejection.what}: {rejection.reason}" for rejection in rejected)
        raise DoesNotFit(f"no strategy fits the memory of the devices: {reasons}")
    best = exact[0] if alone is None or exact[0].step_seconds < MAX_STEP_RATIO * alone.step_seconds else alone
    return Ranking(
        model=model,
        ranked=ranked,
        rejected=(*rejected, *_left_out(model, best)),
        alone=alone,
        best=best,
    )


def _by_speed(model: CostModel) -> list[int]:
    workers = model.workers
    return sorted(range(model.size), key=lambda i: (workers[i].unit_seconds, i))


def _by_node(model: CostModel) -> list[int]:
    """Return the devices node by node, the fastest nodes first, because devices of one model communicate much."""
    members: dict[str, list[int]] = {}
    for device in _by_speed(model):
        members.setdefault(model.topology.nodes[device], []).append(device)
    speeds = {
        node: sum(1 / model.workers[device].unit_seconds for device in devices) for node, devices in members.items()
    }
    return [device for node in sorted(members, key=lambda node: -speeds[node]) for device in members[node]]


def _best_alone(model: CostModel) -> CostEstimate | None:
    """Return the estimate of the fastest single device that can do the job."""
    return min(single_devices(model), key=lambda estimate: estimate.step_seconds, default=None)


def single_devices(model: CostModel) -> list[CostEstimate]:
    """Return the estimate of the first device of each kind that can do the job alone."""
    first: dict[int, int] = {}
    for device, kind in enumerate(model.kinds):
        first.setdefault(kind, device)
    return [estimate for device in first.values() for estimate in estimates_on(model, "serial", [device])[0]]


def _best_of(model: CostModel, strategy: Strategy, order: Sequence[int]) -> tuple[CostEstimate | None, str]:
    """Return the fastest estimate of `strategy` over prefixes of `order`, or the reason why there is none."""
    known: dict[int, CostEstimate] = {}
    reason = "this model cannot be divided over these devices in this way" if order else "no device holds the model"
    sizes = _sizes(len(order), strategy)
    while sizes:
        for size in sizes:
            estimates, why = estimates_on(model, strategy, order[:size])
            reason = why or reason
            if estimates:
                known[size] = min(estimates, key=lambda estimate: estimate.step_seconds)
        sizes = _between(known) if len(sizes) > 2 else []
    if not known:
        return None, reason
    return min(known.values(), key=lambda estimate: estimate.step_seconds), ""


def estimates_on(model: CostModel, strategy: Strategy, devices: Sequence[int]) -> tuple[list[CostEstimate], str]:
    """Return estimates of every candidate on `devices` that fits, and the reason why the last other one does not."""
    estimates, reason = [], ""
    for price in candidates(model, strategy, devices):
        try:
            estimates.append(price())
        except DoesNotFit as error:
            reason = str(error)
    return estimates, reason


def _sizes(size: int, strategy: Strategy) -> list[int]:
    """Return 1, 2, 4 ... and all devices; for large meshes only all, a half and a quarter, or all and a quarter."""
    if strategy.startswith("data+") and size > _MANY_DEVICES:
        return [size // 4, size] if size > _VERY_MANY_DEVICES else [size // 4, size // 2, size]
    return [*(1 << power for power in range(size.bit_length()) if 1 << power < size), size]


def _between(known: dict[int, CostEstimate]) -> list[int]:
    """Return even sizes halfway between the best size and its neighbours; groups can be formed of even sizes."""
    if not known:
        return []
    sizes = sorted(known)
    best = sizes.index(min(sizes, key=lambda size: known[size].step_seconds))
    neighbours = [sizes[i] for i in (best - 1, best + 1) if 0 <= i < len(sizes)]
    middles = {(sizes[best] + size) // 4 * 2 for size in neighbours}
    return sorted(middle for middle in middles if middle > 1 and middle not in known)


def _left_out(model: CostModel, best: CostEstimate) -> list[Rejected]:
    """Return one rejection for every node of which the best estimate uses no device."""
    used = {model.topology.nodes[device] for device in best.devices}
    names = dict.fromkeys(node for node in model.topology.nodes if node not in used)
    return [Rejected(what=node, reason="the step would not be shorter with it", is_node=True) for node in names]


_GROUP_SIZES = (2, 4, 8)
_MAX_MEMBERS = 64
_MAX_STAGES = 64
_FEW_STAGES = 8
_MAX_LOCAL_STEPS = 500

Price = Callable[[], CostEstimate]


def candidates(model: CostModel, strategy: Strategy, devices: Sequence[int]) -> Iterator[Price]:
    """Yield the candidates of `strategy` on exactly `devices`, each as a function that prices it."""
    job, size = model.job, len(devices)
    row = model.topology.ordered(devices)
    if strategy == "serial":
        if size == 1:
            yield lambda: price_mesh(model, [row], "none")
    elif size < 2:
        return
    elif strategy == "data":
        yield lambda: price_mesh(model, [[device] for device in row], "none")
    elif strategy == "averaging":
        yield lambda: price_averaging(model, row, _local_steps(model, row))
    elif strategy in ("server", "asynchronous server"):
        yield lambda: price_server(model, row, row[0], asynchronous=strategy != "server")
    elif strategy == "pipeline":
        if size <= min(_MAX_STAGES, len(job.graph.layers)):
            yield from _pipelines(model, [row])
    elif strategy == "data+pipeline":
        for groups in meshes(model, row):
            if len({len(group) for group in groups}) == 1:
                yield from _pipelines(model, groups)
    elif is_of_teams(strategy):
        yield from _stage_teams(model, strategy, row)
    else:
        yield from _divided(model, strategy, row)


def _divided(model: CostModel, strategy: Strategy, row: Sequence[int]) -> Iterator[Price]:
    mode = division_of(strategy)
    if not strategy.startswith("data+"):
        if len(row) <= _MAX_MEMBERS:
            yield lambda: price_mesh(model, [row], mode)
        return
    for groups in meshes(model, row):
        yield lambda groups=groups: price_mesh(model, groups, mode)  # type: ignore[misc]


def _stage_teams(model: CostModel, strategy: Strategy, row: Sequence[int]) -> Iterator[Price]:
    mode = division_of(strategy)
    for members in _GROUP_SIZES:
        teams = [list(row[i : i + members]) for i in range(0, len(row), members)]
        stages, is_even = len(teams), len(row) % members == 0
        if not is_even or not 1 < stages <= min(_MAX_STAGES, len(model.job.graph.layers)):
            continue
        for times in (2, 4, 8) if stages <= _FEW_STAGES else (4,):
            if times * stages <= model.job.batch_size:
                yield lambda t=teams, m=times * stages: price_stage_teams(model, t, mode, m)  # type: ignore[misc]


def _pipelines(model: CostModel, rows: Sequence[Sequence[int]]) -> Iterator[Price]:
    for times in (2, 4, 8) if len(rows) == 1 and len(rows[0]) <= _FEW_STAGES else (4,):
        micro_batches = times * len(rows[0])
        if micro_batches * len(rows) <= model.job.batch_size:
            yield lambda m=micro_batches: price_pipeline(model, rows, m)  # type: ignore[misc]


def meshes(model: CostModel, row: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield divisions of `row` into at least two groups of several neighbours."""
    seen: set[tuple[int, ...]] = set()
    by_node = [list(group) for _, group in groupby(row, key=lambda device: model.topology.nodes[device])]
    chunks = ([list(row[i : i + m]) for i in range(0, len(row), m)] for m in _GROUP_SIZES if len(row) % m == 0)
    for groups in (by_node, *chunks):
        sizes = tuple(map(len, groups))
        if len(groups) > 1 and min(sizes) > 1 and sizes not in seen:
            seen.add(sizes)
            yield groups


def _local_steps(model: CostModel, devices: Sequence[int]) -> int:
    """Return the fewest local steps, at least 2, for which averaging takes a tenth of the computing."""
    nbytes, channel = model.parameter_bytes, model.topology.ring(devices)
    exchange = all_reduce_seconds(nbytes, len(devices), channel.alpha, channel.beta)
    each = model.job.batch_size / sum(1 / model.workers[device].unit_seconds for device in devices)
    return min(_MAX_LOCAL_STEPS, max(2, ceil(10 * exchange / each)))


def price_stage_teams(
    model: CostModel, teams: Sequence[Sequence[int]], mode: DivisionName, micro_batches: int
) -> CostEstimate:
    """Return the cost of a step in a pipeline whose stages are computed by `teams` of devices.

    Raises:
        DoesNotFit: no cut of the model fits the memory of the devices.
    """
    micro = -(-model.job.batch_size // micro_batches)
    channel = model.topology.ring(*teams)
    costs = [ReplicaCost(model, team, mode, channel) for team in teams]
    line = make_pipeline(model, [team[0] for team in teams], micro, micro_batches, costs)
    ordered = [costs[i] for i in line.order]
    devices = tuple(device for cost in ordered for device in cost.devices)
    inside, inside_bytes = _exchanges(model, ordered, line, micro)
    longest = max(range(len(ordered)), key=lambda stage: line.timeline.busy[stage])
    pairs = [(d, n) for cost, n in zip(ordered, line.parameter_bytes, strict=True) for d in cost.devices]
    exchanging = micro_batches * inside[longest]
    stretch, busy, sending = model.stretch(devices), max(line.timeline.busy), 2 * sum(line.transfer)
    span = slice(line.starts[longest], [*line.starts, len(model.layers)][longest + 1])
    thin, copies = (micro_batches * seconds * stretch for seconds in ordered[longest].overhead(micro, span))
    parts = StepBreakdown(
        computing=(busy - exchanging) * stretch - thin - copies,
        thin_layers=thin,
        copies=copies,
        update=max(model.update_seconds(*pair) for pair in pairs) * stretch,
        layers=exchanging,
        stages=sending,
        idle=max(0.0, line.timeline.seconds - busy - sending),
    )
    members = len(teams[0])
    return CostEstimate(
        strategy=cast(Strategy, f"pipeline+{mode}"),
        devices=devices,
        replicas=(0,) * len(devices),
        samples=(micro,) * len(devices),
        shares=_shares(ordered, line),
        accumulate=micro_batches,
        stages=line.starts,
        members=members,
        schedule=line.schedule,
        parts=parts,
        sent_bytes=round(line.sent_bytes + micro_batches * max(inside_bytes)),
        memory_bytes=tuple(nbytes for nbytes in line.memory_bytes for _ in range(members)),
        bottleneck=parts.longest({**STAGE_BOTTLENECKS, "layers": "exchanges between the devices of a stage"}),
    )


def _exchanges(
    model: CostModel, costs: Sequence[ReplicaCost], line: PipelineReplica, samples: int
) -> tuple[list[float], list[float]]:
    """Return (seconds, bytes of the device that sends most) inside every stage, for a micro-batch of `samples`."""
    spans = [slice(a, b) for a, b in pairwise([*line.starts, len(model.layers)])]
    seconds, sent = [], []
    for cost, span in zip(costs, spans, strict=True):
        split = cost.division
        seconds.append(float(cost.exchanges(samples)[span].sum()))
        nbytes = split.forward.nbytes + split.backward.nbytes if split is not None else None
        sent.append(samples * float(nbytes[span].sum()) if nbytes is not None else 0.0)
    return seconds, sent


def _shares(costs: Sequence[ReplicaCost], line: PipelineReplica) -> tuple[float, ...]:
    """Return the fraction of all work of every device: its share of its stage's fraction."""
    stages = [busy / sum(line.timeline.busy) for busy in line.timeline.busy]
    pairs = zip(costs, stages, strict=True)
    return tuple(stage * share / sum(cost.shares) for cost, stage in pairs for share in cost.shares)
