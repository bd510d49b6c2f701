"""How each strategy scales: seconds, efficiency and memory against the number of devices, and where it stops paying."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from evener.errors import require
from evener.oracle.forecast.quote import Quote
from evener.oracle.forecast.scenario import Job, Scenario
from evener.oracle.forecast.search import EVERY_STRATEGY, WORTH, quotes_on
from evener.plan import Strategy
from evener.profile import ClusterProfile


@dataclass(frozen=True, kw_only=True)
class Point:
    """A strategy on some devices.

    Attributes:
        devices: number of them.
        quote: the fastest one that uses all of them.
        efficiency: of the devices' summed speeds, what training gets.
    """

    devices: int
    quote: Quote
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
    job: Job, profile: ClusterProfile, sizes: Collection[int], strategies: Collection[Strategy] = EVERY_STRATEGY
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
        scenario = Scenario(job, part)
        for strategy in strategies:
            for point in _points(scenario, strategy):
                found[strategy].append(point)
    return tuple(
        Curve(strategy=strategy, points=tuple(points), pays_up_to=_pays_up_to(points))
        for strategy, points in found.items()
    )


def _points(scenario: Scenario, strategy: Strategy) -> Iterator[Point]:
    """The fastest quote of `strategy` on all devices of `scenario`, if there is one."""
    quotes, _ = quotes_on(scenario, strategy, range(scenario.size))
    if quotes:
        best = min(quotes, key=lambda quote: quote.step_seconds)
        ideal = scenario.job.batch_size / sum(1 / worker.unit_seconds for worker in scenario.workers)
        yield Point(devices=scenario.size, quote=best, efficiency=ideal / best.step_seconds)


def _pays_up_to(points: list[Point]) -> int:
    best: Point | None = None
    for point in points:
        if best is None or point.quote.step_seconds < WORTH * best.quote.step_seconds:
            best = point
    return best.devices if best else 0
