"""Money and energy of a plan, from what nodes cost an hour and how many watts they take.

A plan pays for every node of which it uses a device, as a whole and for as long as it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from evener.oracle.cost.model import CostEstimate, CostModel
from evener.oracle.search import Ranking, single_devices
from evener.records.errors import InvalidValue

SAMPLES = 1_000_000
"""Samples for which expenses are stated."""
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Expenses:
    """What a plan takes for a million samples.

    Attributes:
        strategy: strategy of the plan.
        devices: number of its devices.
        nodes: names of its nodes.
        hours: hours of training.
        price: money, in the unit of the prices; None without prices.
        energy: kilowatt-hours; None without watts.
    """

    strategy: str
    devices: int
    nodes: tuple[str, ...]
    hours: float
    price: float | None
    energy: float | None


def compare_expenses(ranking: Ranking, prices: Mapping[str, float], watts: Mapping[str, float]) -> tuple[Expenses, ...]:
    """Return the expenses of each strategy's best plan and of the cheapest device of each kind, the lowest first.

    They are ordered by money, or by energy if there are no prices.

    Args:
        ranking: plans.
        prices: of an hour of every node; empty if they are not known.
        watts: of every node; empty if they are not known.
    """
    model = ranking.model
    plans = [_expenses(model, one, prices, watts) for one in ranking.ranked if one.strategy != "serial"]
    for alone in single_devices(model):
        kind = model.kinds[alone.devices[0]]
        same = (replace(alone, devices=(device,)) for device in range(model.size) if model.kinds[device] == kind)
        plans.append(min((_expenses(model, one, prices, watts) for one in same), key=_order))
    return tuple(sorted(plans, key=_order))


def _order(one: Expenses) -> float:
    return one.price if one.price is not None else one.energy or 0.0


def _expenses(
    model: CostModel, estimate: CostEstimate, prices: Mapping[str, float], watts: Mapping[str, float]
) -> Expenses:
    nodes = tuple(dict.fromkeys(model.topology.nodes[device] for device in estimate.devices))
    hours = estimate.step_seconds * SAMPLES / model.job.batch_size / _HOUR
    return Expenses(
        strategy=estimate.strategy,
        devices=len(estimate.devices),
        nodes=nodes,
        hours=hours,
        price=hours * sum(prices[node] for node in nodes) if prices else None,
        energy=hours * sum(watts[node] for node in nodes) / 1000 if watts else None,
    )


def rates_of(text: str, option: str, nodes: Mapping[str, object]) -> dict[str, float]:
    """Return a number for every node from `0.5`, for all, or `ada=0.5,bob=0.2`; empty from an empty text.

    Args:
        text: see above.
        option: option that has it.
        nodes: names of all nodes.

    Raises:
        InvalidValue: a number is none or negative, or a node is not known or missing.
    """
    if not text:
        return {}
    pairs = [part.strip().rpartition("=") for part in text.split(",")]
    named = {name.strip(): _number(number, option) for name, _, number in pairs}
    if list(named) == [""]:
        return dict.fromkeys(nodes, named[""])
    if unknown := [name for name in named if name not in nodes]:
        raise InvalidValue(option, unknown[0], f"one of the nodes {', '.join(nodes)}")
    if missing := [name for name in nodes if name not in named]:
        raise InvalidValue(option, text, f"a number for every node; {', '.join(missing)} has none")
    return named


def _number(text: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not isfinite(number) or number < 0:
        raise InvalidValue(option, text.strip(), "a number from 0 on, or one for every node as in ada=0.5,bob=0.2")
    return number
