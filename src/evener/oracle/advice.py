"""Turns a ranking into advice of at most two sentences, into the Plan that training performs, and into scaling curves.

A scaling curve gives seconds, efficiency and memory of a strategy by number of devices, and how many devices still
help.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.search import ALL_STRATEGIES, MAX_STEP_RATIO, ON_REQUEST_STRATEGIES, Ranking, estimates_on
from evener.records.errors import require
from evener.records.plan import Assignment, Plan, Prediction, Rejected, Strategy
from evener.records.profile import ClusterProfile

_MIN_AVERAGING_GAIN = 1.1
"""Advise local steps only if they are at least this many times as fast as the best strategy that trains equally."""


def advice(ranking: Ranking) -> str:
    """Return what to do and why; where local steps would be faster, name that option and its price."""
    sentences = [_first(ranking)]
    other = next((estimate for estimate in ranking.ranked if estimate.strategy == "averaging"), None)
    if other is not None and ranking.best.step_seconds > _MIN_AVERAGING_GAIN * other.step_seconds:
        sentences.append(_second(ranking, other))
    return " ".join(sentences)


def plan_of(ranking: Ranking, estimate: CostEstimate | None = None, *, spread: float = 0.0) -> Plan:
    """Return the plan of `estimate`, by default the best one, together with the rejected alternatives.

    Args:
        ranking: estimates.
        estimate: one of them.
        spread: see `Prediction`.
    """
    estimate, model = estimate or ranking.best, ranking.model
    fastest = min(model.workers[device].unit_seconds for device in estimate.devices)
    names = [layer.name for layer in model.job.graph.layers]
    pipelined = bool(estimate.stages)
    stages = [rank // estimate.members % max(1, len(estimate.stages)) for rank in range(len(estimate.devices))]
    assignments = tuple(
        Assignment(
            rank=rank,
            node=model.profile.devices[device].node,
            device=model.profile.devices[device].device,
            samples=estimate.samples[rank],
            fixed_seconds=model.workers[device].fixed_seconds,
            sample_seconds=model.workers[device].unit_seconds,
            reason=f"speed {fastest / model.workers[device].unit_seconds:.2f} of the fastest",
            replica=estimate.replicas[rank],
            share=estimate.shares[rank],
            stage=stages[rank],
            first_layer=names[estimate.stages[stages[rank]]] if pipelined else "",
            memory_bytes=estimate.memory_bytes[rank],
        )
        for rank, device in enumerate(estimate.devices)
    )
    return Plan(
        strategy=estimate.strategy,
        batch_size=model.job.batch_size,
        accumulate=estimate.accumulate,
        assignments=assignments,
        prediction=_prediction(ranking, estimate, spread),
        rejected=(*_slower(ranking, estimate), *ranking.rejected),
        local_steps=estimate.local_steps,
        members=estimate.members,
        schedule=estimate.schedule,
        advice=advice(ranking),
    )


def _prediction(ranking: Ranking, estimate: CostEstimate, spread: float) -> Prediction:
    return Prediction(
        step_seconds=estimate.step_seconds,
        compute_seconds=estimate.compute_seconds,
        communication_seconds=estimate.communication_seconds,
        sent_bytes=estimate.sent_bytes,
        alone_seconds=ranking.alone.step_seconds if ranking.alone else None,
        waiting_seconds=estimate.waiting_seconds,
        bottleneck=estimate.bottleneck,
        spread=spread,
    )


def _slower(ranking: Ranking, estimate: CostEstimate) -> list[Rejected]:
    """Return the other strategies with their predicted seconds per step."""
    return [
        Rejected(
            what=_name(other),
            reason=_why_not(other, estimate),
            step_seconds=other.step_seconds,
        )
        for other in ranking.ranked
        if other is not estimate
    ]


def _why_not(other: CostEstimate, estimate: CostEstimate) -> str:
    if other.step_seconds < estimate.step_seconds and other.strategy in ON_REQUEST_STRATEGIES:
        return "does not train the same as one process"
    return f"slower: {other.bottleneck}"


def _name(estimate: CostEstimate) -> str:
    if estimate.local_steps > 1:
        return f"{estimate.strategy} after every {estimate.local_steps} steps"
    return estimate.strategy


def _first(ranking: Ranking) -> str:
    best, model = ranking.best, ranking.model
    if len(best.devices) == 1:
        name = model.name(best.devices[0])
        if model.size == 1:
            return f"Train on {name}."
        return f"Train on {name} alone: {_next_best(ranking)}."
    speed = ranking.speedup(best)
    gain = f"{speed:.2g}x the best single device" if speed else "no single device could hold the job"
    devices = f"{len(best.devices)} of {model.size} devices"
    return f"Use {best.strategy} on {devices}: {gain}; the limit is {best.bottleneck}."


def _next_best(ranking: Ranking) -> str:
    """Return why more devices do not help: the best such plan and its bottleneck."""
    others = [q for q in ranking.ranked if len(q.devices) > 1 and q.strategy not in ON_REQUEST_STRATEGIES]
    if not others:
        return "nothing else fits the memory"
    speed = ranking.speedup(others[0])
    return (
        f"{others[0].strategy} on {len(others[0].devices)} devices is {speed:.2g}x, because of {others[0].bottleneck}"
    )


def _second(ranking: Ranking, other: CostEstimate) -> str:
    speed = ranking.speedup(other)
    gain = f"{speed:.2g}x" if speed else f"{ranking.best.step_seconds / other.step_seconds:.2g}x that speed"
    return (
        f"Averaging after every {other.local_steps} local steps is {gain} on {len(other.devices)} devices: "
        "use it if the result may differ slightly from single-process training."
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A strategy on a number of devices.

    Attributes:
        devices: number of devices.
        estimate: the fastest estimate that uses all of them.
        efficiency: samples per second divided by the sum of the devices' own samples per second.
    """

    devices: int
    estimate: CostEstimate
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A strategy over numbers of devices.

    Attributes:
        strategy: the strategy of this curve.
        points: one per number of devices, increasing; numbers on which the strategy cannot run are omitted.
        pays_up_to: the largest number of devices that still shortens the step by 1 %; 0 if the strategy cannot run.
    """

    strategy: Strategy
    points: tuple[Point, ...]
    pays_up_to: int


def scale(
    job: TrainingJob, profile: ClusterProfile, sizes: Collection[int], strategies: Collection[Strategy] = ALL_STRATEGIES
) -> tuple[Curve, ...]:
    """Return the curves of `strategies` on the first 1, 2, 4 ... devices of `profile`.

    Args:
        job: what is trained; the batch size is the same for every number of devices (strong scaling).
        profile: at least as many devices as the largest size.
        sizes: numbers of devices.
        strategies: strategies to price.

    Raises:
        InvalidValue: the profile has fewer devices than the largest size.
    """
    require(0 < max(sizes) <= len(profile.devices), "--scale", max(sizes), f"at most {len(profile.devices)} devices")
    points_of: dict[Strategy, list[Point]] = {strategy: [] for strategy in strategies}
    for size in sorted(sizes):
        part = msgspec.structs.replace(
            profile,
            devices=profile.devices[:size],
            links=tuple(link for link in profile.links if max(link.source, link.target) < size),
        )
        model = CostModel(job, part)
        for strategy in strategies:
            for point in _points(model, strategy):
                points_of[strategy].append(point)
    return tuple(
        Curve(strategy=strategy, points=tuple(points), pays_up_to=_pays_up_to(points))
        for strategy, points in points_of.items()
    )


def _points(model: CostModel, strategy: Strategy) -> Iterator[Point]:
    """Yield the fastest estimate of `strategy` on all devices of `model`, if one fits."""
    estimates, _ = estimates_on(model, strategy, range(model.size))
    if estimates:
        best = min(estimates, key=lambda estimate: estimate.step_seconds)
        ideal = model.job.batch_size / sum(1 / worker.unit_seconds for worker in model.workers)
        yield Point(devices=model.size, estimate=best, efficiency=ideal / best.step_seconds)


def _pays_up_to(points: list[Point]) -> int:
    best: Point | None = None
    for point in points:
        if best is None or point.estimate.step_seconds < MAX_STEP_RATIO * best.estimate.step_seconds:
            best = point
    return best.devices if best else 0
