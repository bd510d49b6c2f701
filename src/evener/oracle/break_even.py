"""Finds what would change the best plan: faster or slower links, a larger or smaller batch, more or less memory.

Factors are tried in powers of four; between the last one with the same choice and the first one with another the place
of the change is found by halving. The choice is the strategy and its number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.search import ALL_STRATEGIES, search
from evener.records.errors import DoesNotFit
from evener.records.plan import Strategy
from evener.records.profile import ClusterProfile, Fabric

Varied = Literal["links", "batch", "memory"]
LARGEST_FACTOR = 1024.0
_STEP, _NUM_HALVINGS = 4.0, 5
"""Ratio of the tried factors, and steps of halving: the place of a change is then known within 5 %."""
NOTHING_FITS = "nothing fits"


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """A change of the best plan.

    Attributes:
        varied: quantity that is varied alone: speed of all links, samples of a step, or memory of all devices.
        factor: factor at which the best plan changes; 1024 or 1/1024, the last one tried, if it does not.
        is_change: whether the best plan changes.
        strategy: strategy that is best beyond the factor, or `nothing fits`.
        devices: number of its devices.
    """

    varied: Varied
    factor: float
    is_change: bool = True
    strategy: str
    devices: int


def break_evens(model: CostModel, strategies: Collection[Strategy] = ALL_STRATEGIES) -> tuple[BreakEven, ...]:
    """Return where the best plan changes if links, batch or memory change, in both directions each.

    Args:
        model: job and machines.
        strategies: strategies to choose from.

    Raises:
        DoesNotFit: nothing fits as it is.
    """
    best = search(model, strategies).best
    present = best.strategy, len(best.devices)
    return tuple(
        _first_change(varied, ratio, present, partial(_choice_at, model, vary, strategies))
        for varied, vary in _VARIATIONS.items()
        for ratio in (_STEP, 1 / _STEP)
    )


def _first_change(
    varied: Varied, ratio: float, present: tuple[str, int], choice_at: Callable[[float], tuple[str, int]]
) -> BreakEven:
    same, changed = 1.0, ratio
    while (choice := choice_at(changed)) == present:
        if not 1 / LARGEST_FACTOR < changed < LARGEST_FACTOR:
            return BreakEven(varied=varied, factor=changed, is_change=False, strategy=present[0], devices=present[1])
        same, changed = changed, changed * ratio
    for _ in range(_NUM_HALVINGS):
        middle = (same * changed) ** 0.5
        between = choice_at(middle)
        if between == present:
            same = middle
        else:
            changed, choice = middle, between
    return BreakEven(varied=varied, factor=changed, strategy=choice[0], devices=choice[1])


def _choice_at(
    model: CostModel, vary: Callable[[CostModel, float], CostModel], strategies: Collection[Strategy], factor: float
) -> tuple[str, int]:
    try:
        best = search(vary(model, factor), strategies).best
    except DoesNotFit:
        return NOTHING_FITS, 0
    return best.strategy, len(best.devices)


def _with_links(model: CostModel, factor: float) -> CostModel:
    """Return `model` with all links `factor` times as fast, in latency and in bandwidth."""
    links = tuple(
        msgspec.structs.replace(link, alpha=link.alpha / factor, beta=link.beta / factor)
        for link in model.profile.links
    )
    fabrics = tuple(_faster(fabric, factor) for fabric in model.profile.fabrics)
    return CostModel(model.job, msgspec.structs.replace(model.profile, links=links, fabrics=fabrics))


def _faster(fabric: Fabric, factor: float) -> Fabric:
    shared = None if fabric.shared_bandwidth is None else fabric.shared_bandwidth * factor
    return msgspec.structs.replace(
        fabric, alpha=fabric.alpha / factor, beta=fabric.beta / factor, shared_bandwidth=shared
    )


def _with_batch(model: CostModel, factor: float) -> CostModel:
    job: TrainingJob = replace(model.job, batch_size=max(1, round(model.job.batch_size * factor)))
    return CostModel(job, model.profile)


def _with_memory(model: CostModel, factor: float) -> CostModel:
    devices = tuple(
        msgspec.structs.replace(
            device,
            memory_bytes=max(1, round(device.memory_bytes * factor)),
            usable_memory_bytes=max(1, round(device.usable_memory_bytes * factor)),
        )
        for device in model.profile.devices
    )
    profile: ClusterProfile = msgspec.structs.replace(model.profile, devices=devices)
    return CostModel(model.job, profile)


_VARIATIONS: dict[Varied, Callable[[CostModel, float], CostModel]] = {
    "links": _with_links,
    "batch": _with_batch,
    "memory": _with_memory,
}
