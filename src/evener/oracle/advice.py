"""What follows from a ranking: advice in at most two sentences, the Plan that training performs, and curves of scaling.

A curve shows seconds, efficiency and memory of a strategy against the number of devices, and where it stops paying.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.search import EVERY_STRATEGY, LEARNS_OTHERWISE, WORTH, Ranking, estimates_on
from evener.records.errors import require
from evener.records.plan import Assignment, Plan, Prediction, Rejected, Strategy
from evener.records.profile import ClusterProfile

_MUCH = 1.1
"""Local steps are advised from this many times the speed of what learns exactly alike on."""


def advice(ranking: Ranking) -> str:
    """What to do and why; if it pays, what else would be faster and at which price."""
    sentences = [_first(ranking)]
    other = next((estimate for estimate in ranking.ranked if estimate.strategy == "averaging"), None)
    if other is not None and ranking.best.step_seconds > _MUCH * other.step_seconds:
        sentences.append(_second(ranking, other))
    return " ".join(sentences)


def plan_of(ranking: Ranking, estimate: CostEstimate | None = None) -> Plan:
    """The plan of `estimate`, by default the best one's, with what was rejected for it."""
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
        prediction=_prediction(ranking, estimate),
        rejected=(*_slower(ranking, estimate), *ranking.rejected),
        local_steps=estimate.local_steps,
        members=estimate.members,
        advice=advice(ranking),
    )


def _prediction(ranking: Ranking, estimate: CostEstimate) -> Prediction:
    return Prediction(
        step_seconds=estimate.step_seconds,
        compute_seconds=estimate.compute_seconds,
        communication_seconds=estimate.communication_seconds,
        sent_bytes=estimate.sent_bytes,
        alone_seconds=ranking.alone.step_seconds if ranking.alone else None,
        waiting_seconds=estimate.waiting_seconds,
        bottleneck=estimate.bottleneck,
    )


def _slower(ranking: Ranking, estimate: CostEstimate) -> list[Rejected]:
    """The other strategies, with what they would take."""
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
    if other.step_seconds < estimate.step_seconds and other.strategy in LEARNS_OTHERWISE:
        return "does not give what one process would"
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
    """Why more devices do not pay: the best of them and what it spends its time on."""
    others = [q for q in ranking.ranked if len(q.devices) > 1 and q.strategy not in LEARNS_OTHERWISE]
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
        "use it if the result may differ a little from that of one process."
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A strategy on some devices.

    Attributes:
        devices: number of them.
        estimate: the fastest one that uses all of them.
        efficiency: of the devices' summed speeds, what training gets.
    """

    devices: int
    estimate: CostEstimate
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A strategy over numbers of devices.

    Attributes:
        strategy: whose curve it is.
        points: by increasing number of devices; numbers at which it cannot run are left out.
        pays_up_to: the number from which on no larger one is at least 1 % faster; 0 if it cannot run.
    """

    strategy: Strategy
    points: tuple[Point, ...]
    pays_up_to: int


def scale(
    job: TrainingJob, profile: ClusterProfile, sizes: Collection[int], strategies: Collection[Strategy] = EVERY_STRATEGY
) -> tuple[Curve, ...]:
    """The curves of `strategies` on the first 1, 2, 4 ... devices of `profile`.

    Args:
        job: with the batch of all sizes alike: what is asked is how much sooner the same step is done.
        profile: of at least as many devices as the largest size.
        sizes: numbers of devices.
        strategies: to look at.

    Raises:
        InvalidValue: the profile has fewer devices than the largest size.
    """
    require(0 < max(sizes) <= len(profile.devices), "--scale", max(sizes), f"at most {len(profile.devices)} devices")
    found: dict[Strategy, list[Point]] = {strategy: [] for strategy in strategies}
    for size in sorted(sizes):
        part = msgspec.structs.replace(
            profile,
            devices=profile.devices[:size],
            links=tuple(link for link in profile.links if max(link.source, link.target) < size),
        )
        model = CostModel(job, part)
        for strategy in strategies:
            for point in _points(model, strategy):
                found[strategy].append(point)
    return tuple(
        Curve(strategy=strategy, points=tuple(points), pays_up_to=_pays_up_to(points))
        for strategy, points in found.items()
    )


def _points(model: CostModel, strategy: Strategy) -> Iterator[Point]:
    """The fastest estimate of `strategy` on all devices of `model`, if there is one."""
    estimates, _ = estimates_on(model, strategy, range(model.size))
    if estimates:
        best = min(estimates, key=lambda estimate: estimate.step_seconds)
        ideal = model.job.batch_size / sum(1 / worker.unit_seconds for worker in model.workers)
        yield Point(devices=model.size, estimate=best, efficiency=ideal / best.step_seconds)


def _pays_up_to(points: list[Point]) -> int:
    best: Point | None = None
    for point in points:
        if best is None or point.estimate.step_seconds < WORTH * best.estimate.step_seconds:
            best = point
    return best.devices if best else 0
