"""Prediction of a plan's step time: every rank profiles its part alone, exchanges are measured, the oracle combines.

    profile      each rank performs its part without exchanges       its computing between exchanges
    measure      exchanges of those kinds and sizes, nothing else    the time of the links
    replay       by the oracle, nothing is run                       the time of all together

No step of the plan is performed; waiting times are computed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isinf
from statistics import median_low
from typing import TypeAlias

import msgspec

from evener.benchmark.dry_run import random_numbers_kept
from evener.benchmark.exchanges import distinct_sizes, measure_exchanges
from evener.benchmark.fake_group import EventTrace, FakeGroup, fake_group, known_to_torch
from evener.benchmark.links import measure_message
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.data.loader import to_device
from evener.oracle.data_parallel import fitted_to_step_profile
from evener.oracle.replay import ExchangeKind, ExchangePoint, ExchangeTiming, RankStep, TraceEvent, replay
from evener.oracle.uncertainty import REHEARSED
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import ParallelModel
from evener.parallel.process_mesh import ProcessMesh
from evener.records.decoding import decode_json
from evener.records.errors import require
from evener.records.plan import Plan, Prediction
from evener.training.context import RankContext

_SECONDS = 1.2
"""For the profile, about."""
_PART = 1 / 20
"""The largest fraction of a run's steps to profile, so that a short run starts soon."""

_Ranks = tuple[int, ...]
_Round = tuple[TraceEvent, ...]
_Timings = dict[_Ranks, list[ExchangeTiming]]


def predict(context: RankContext, plan: Plan, build: Callable[[FakeGroup], ParallelModel], *others: Group) -> Plan:
    """Return `plan` with its predicted step time; the same on all ranks of `context`, which are those of the plan.

    The plan stays as it is if there is no memory for a second copy of this rank's part.

    Args:
        context: of this rank.
        plan: with its stages, if it is of a pipeline.
        build: makes a twin of this rank's part in a fake group, which exchanges nothing.
        others: further groups in which the part exchanges tensors.
    """
    group, device = context.group, context.env.device
    trace, timer = EventTrace(device), StepTimer(device, group.timer.pace.speed)
    timer.pace.reference = group.timer.pace.reference
    silent = fake_group(group, range(group.size), timer, trace)
    num_steps = context.epochs * -(-context.num_samples // context.batch_size)
    with random_numbers_kept(device), known_to_torch(silent):
        rounds_here = profile_step(
            group, trace, lambda: _step(context, plan, build(silent)), _SECONDS, round(_PART * num_steps)
        )
    if not rounds_here:
        return plan
    sent = silent.traffic.sent_bytes / (len(rounds_here) + WARM_UP_STEPS)
    rows = group.all_gather_bytes(msgspec.json.encode((sent, rounds_here)))
    results = [decode_json(row, tuple[float, list[_Round]]) for row in rows]
    rounds = list(zip(*(events for _, events in results), strict=True))
    timings = _measure([group, *others, *silent.made], group, rounds[0])
    played = [_play(parts, timings) for parts in rounds]
    seconds = [max(rank.seconds for rank in ranks) for ranks in played]
    typical = played[seconds.index(median_low(seconds))]
    prediction = _prediction(typical, max(sent for sent, _ in results))
    plan = msgspec.structs.replace(plan, prediction=prediction)
    return fitted_to_step_profile(plan, [rank.computing for rank in typical]) if plan.strategy == "data" else plan


def silent_mesh(mesh: ProcessMesh, silent: FakeGroup) -> ProcessMesh:
    """Return the same mesh with fake groups."""
    if mesh.group is mesh.world:
        return replace(mesh, world=silent, group=silent)
    silent_group = fake_group(mesh.group, mesh.arrangement.ranks_of(mesh.index), silent.timer, silent.trace)
    silent_group.traffic = silent.traffic
    return replace(mesh, world=silent, group=silent_group)


def _step(context: RankContext, plan: Plan, model: ParallelModel) -> Callable[[], None]:
    """Return a function that performs this rank's part of a step."""
    optimizer, timer = ModelOptimizer(context.make_optimizer, model.held()), model.group.timer
    calls = plan.loaded_micro_batches
    samples, total = plan.replica_samples[model.replica], plan.micro_batch_size * calls
    if calls < plan.accumulate:  # a pipeline cuts a batch, whose parts need not be equal
        samples, total = round(plan.batch_size * samples / sum(plan.replica_samples)), plan.batch_size
    model.train()

    def micro_batch(is_last: bool) -> None:
        timer.resume("io")
        inputs, targets = to_device(context.samples(max(1, samples)), context.env.device)
        timer.pause()
        timer.pace.expect(samples)
        timer.resume("fb")
        model.add_gradients(inputs, targets, samples=samples, total=total, is_last=is_last)
        timer.pause()

    def step() -> None:
        for number in range(calls):
            micro_batch(is_last=number == calls - 1)
        timer.resume("wu")
        if (bound := context.task.clip_norm) is not None:
            model.clip(bound)
        optimizer.step()
        optimizer.clear_gradients()
        timer.close_step(samples * calls)

    return step


def _measure(groups: Sequence[Group], world: Group, parts: Sequence[_Round]) -> _Timings:
    """Measure exchanges like those of `parts`, by participating ranks.

    Small groups come first, so that replicas exchange at the same time, as they do in a step; in one order everywhere.
    """
    named = {tuple(world.nodes.index(node) for node in group.nodes): group for group in groups if group.size > 1}
    ordered = sorted(named.items(), key=lambda one: (len(one[0]), one[0]))
    measured = [(ranks, measure_exchanges(group, _sizes(parts, ranks))) for ranks, group in ordered]
    timings: _Timings = {}
    for row in world.all_gather_bytes(msgspec.json.encode(measured)):
        timings |= dict(decode_json(row, list[tuple[_Ranks, list[ExchangeTiming]]]))
    messages = [event for part in parts for event in part if event.act == "begin" and event.kind == "message"]
    for hop in sorted({event.ranks for event in messages}):
        sizes = distinct_sizes(event.nbytes for event in messages if event.ranks == hop)
        timings.setdefault(hop, []).append(_passing(world, hop, sizes))
    return timings


def _passing(world: Group, hop: _Ranks, sizes: Sequence[int]) -> ExchangeTiming:
    """Measure messages from one rank to another; they are assumed to overlap with computing."""
    points = (
        ExchangePoint(nbytes=size, seconds=measure_message(world, hop[0], hop[1], size), beside=0.0) for size in sizes
    )
    return ExchangeTiming(kind="message", ranks=2, points=tuple(points))


def _sizes(parts: Sequence[_Round], ranks: _Ranks) -> dict[ExchangeKind, set[int]]:
    """Return the sizes of exchanges among `ranks` by kind; with neighbour exchanges, each may become one."""
    sizes: dict[ExchangeKind, set[int]] = {}
    for event in (event for part in parts for event in part):
        if event.act == "begin" and event.ranks == ranks and event.kind != "message":
            sizes.setdefault(event.kind, set()).add(event.nbytes)
    if "neighbours" in sizes:
        sizes["neighbours"] |= sizes.get("exchange", set())
    return sizes


def _play(parts: Sequence[_Round], timings: _Timings) -> list[RankStep]:
    def cost(kind: ExchangeKind, ranks: _Ranks, nbytes: int, meanwhile: float) -> float:
        return next(timing for timing in timings[ranks] if timing.kind == kind).seconds(nbytes, meanwhile)

    return replay(parts, cost)


def _prediction(played: Sequence[RankStep], sent: float) -> Prediction:
    seconds = max(rank.seconds for rank in played)
    slowest = max(played, key=lambda rank: rank.computing)
    times = {
        "computing of the slowest rank": slowest.computing,
        "exchanges": slowest.exchanging,
        "waiting for the slowest rank of every exchange": seconds - slowest.computing - slowest.exchanging,
    }
    return Prediction(
        step_seconds=seconds,
        compute_seconds=slowest.computing,
        communication_seconds=slowest.exchanging,
        waiting_seconds=max(0.0, seconds - slowest.computing - slowest.exchanging),
        sent_bytes=round(sent),
        bottleneck=max(times, key=lambda part: times[part]),
        spread=REHEARSED.spread,
    )


WARM_UP_STEPS = 2
"""Steps that do not count: DistributedDataParallel reorders its buckets after the first one."""
_MAX_ROUNDS = 7

Step: TypeAlias = Callable[[], object]


def profile_step(
    group: Group, trace: EventTrace, prepare: Callable[[], Step], seconds: float, rounds: int = _MAX_ROUNDS
) -> list[tuple[TraceEvent, ...]]:
    """Return the events of up to `rounds` steps, the same number on every rank; `prepare` returns the step function.

    All steps take about `seconds`, more if three steps take longer. The result is empty, with a warning, if a rank
    cannot perform its part: a GPU may lack memory for a second copy of the weights, and a failed forecast must not end
    a run.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    step, slowest = _warm_up(group, trace, prepare)
    if step is None:
        return []
    rounds = max(1, min(rounds, _MAX_ROUNDS, int(seconds / slowest) - WARM_UP_STEPS))
    steps = []
    for _ in range(rounds):
        group.barrier()
        steps.append(_round(trace, step))
    return steps


def _warm_up(group: Group, trace: EventTrace, prepare: Callable[[], Step]) -> tuple[Step | None, float]:
    """Return the step function and the slowest rank's seconds of the last step; None if a rank cannot perform it.

    All ranks exchange the result after every step, so that they stay synchronised even if a rank fails in its step.
    """
    step: Step | None = None
    slowest = inf
    for _ in range(WARM_UP_STEPS):
        duration = inf
        try:
            step = step or prepare()
            start = time.perf_counter()
            _round(trace, step)
            duration = time.perf_counter() - start
        except Exception as error:
            warnings.warn(f"this rank cannot profile a step, so nothing is predicted: {error!r}", stacklevel=3)
        (slowest,) = group.all_reduce_max([duration])
        if isinf(slowest):
            return None, inf
    return step, slowest


def _round(trace: EventTrace, step: Step) -> tuple[TraceEvent, ...]:
    trace.start()
    step()
    return trace.finish()
