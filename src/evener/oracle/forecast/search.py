"""Finds the best way to train: prices the candidates of every strategy and ranks them.

No set of devices is ever recommended that is slower than its best member: one device alone is a candidate, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from evener.errors import DoesNotFit
from evener.oracle.forecast.candidates import priced
from evener.oracle.forecast.quote import Quote
from evener.oracle.forecast.scenario import Scenario
from evener.plan import Rejected, Strategy

_MANY, _VERY_MANY = 32, 128
_ALONE: frozenset[Strategy] = frozenset(("data", "averaging", "server", "asynchronous server"))
"""Strategies in which every device holds a model of its own."""
EVERY_STRATEGY: tuple[Strategy, ...] = get_args(Strategy)
LEARNS_OTHERWISE: frozenset[Strategy] = frozenset(("averaging", "server", "asynchronous server"))
"""Strategies that do not give what one process would; chosen only where they are asked for. (A synchronous server does,
but it is a star: it is for machines that come and go.)"""
WORTH = 0.99
"""More devices have to bring a step to this fraction of what fewer take: a predicted gain below 1 % is noise."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is to be expected.

    Attributes:
        scenario: that was looked at.
        ranked: the best quote of every strategy that can run, fastest first.
        rejected: strategies that cannot run, and devices left out of the best one.
        alone: the best single device's quote; None where the job fits none.
        best: the quote to take: the fastest that learns what one process would.
    """

    scenario: Scenario
    ranked: tuple[Quote, ...]
    rejected: tuple[Rejected, ...]
    alone: Quote | None
    best: Quote

    def speedup(self, quote: Quote) -> float | None:
        """How many times as fast as the best single device; None where the job fits none."""
        return self.alone.step_seconds / quote.step_seconds if self.alone else None


def search(scenario: Scenario, strategies: Collection[Strategy] = EVERY_STRATEGY) -> Outlook:
    """The best way of each of `strategies`, and of all.

    Raises:
        DoesNotFit: nothing fits the memory of the devices, together or alone.
    """
    found: dict[Strategy, Quote] = {}
    rejected: list[Rejected] = []
    alone = _best_alone(scenario)
    orders = {True: [i for i in _by_speed(scenario) if scenario.workers[i].most != 0], False: _by_node(scenario)}
    for strategy in strategies:
        if strategy == "serial":
            continue
        best, reason = _best_of(scenario, strategy, orders[strategy in _ALONE])
        if best is not None:
            found[strategy] = best
        elif scenario.size > 1:
            rejected.append(Rejected(what=strategy, reason=reason))
    if alone is not None:
        found["serial"] = alone
    else:
        rejected.append(Rejected(what="serial", reason="no single device holds the model and one sample"))
    ranked = tuple(sorted(found.values(), key=lambda quote: quote.step_seconds))
    alike = [quote for quote in ranked if quote.strategy not in LEARNS_OTHERWISE] or list(ranked)
    if not alike:
        reasons = "; ".join(f"{one.what}: {one.reason}" for one in rejected)
        raise DoesNotFit(f"nothing fits the memory of the devices: {reasons}")
    best = alike[0] if alone is None or alike[0].step_seconds < WORTH * alone.step_seconds else alone
    return Outlook(
        scenario=scenario,
        ranked=ranked,
        rejected=(*rejected, *_left_out(scenario, best)),
        alone=alone,
        best=best,
    )


def _by_speed(scenario: Scenario) -> list[int]:
    workers = scenario.workers
    return sorted(range(scenario.size), key=lambda i: (workers[i].unit_seconds, i))


def _by_node(scenario: Scenario) -> list[int]:
    """Devices node by node, because those of one model talk much: the fastest nodes first."""
    members: dict[str, list[int]] = {}
    for device in _by_speed(scenario):
        members.setdefault(scenario.topology.nodes[device], []).append(device)
    speeds = {
        node: sum(1 / scenario.workers[device].unit_seconds for device in devices) for node, devices in members.items()
    }
    return [device for node in sorted(members, key=lambda node: -speeds[node]) for device in members[node]]


def _best_alone(scenario: Scenario) -> Quote | None:
    """The quote of the fastest device that can do the job by itself; one of each kind is asked."""
    first: dict[int, int] = {}
    for device, kind in enumerate(scenario.kinds):
        first.setdefault(kind, device)
    quotes = [quote for device in first.values() for quote in quotes_on(scenario, "serial", [device])[0]]
    return min(quotes, key=lambda quote: quote.step_seconds, default=None)


def _best_of(scenario: Scenario, strategy: Strategy, order: Sequence[int]) -> tuple[Quote | None, str]:
    """The fastest quote of `strategy` over sets of the first devices of `order`, or why there is none."""
    known: dict[int, Quote] = {}
    reason = "there is no such way to divide this model over these devices" if order else "no device holds the model"
    sizes = _sizes(len(order), strategy)
    while sizes:
        for size in sizes:
            quotes, why = quotes_on(scenario, strategy, order[:size])
            reason = why or reason
            if quotes:
                known[size] = min(quotes, key=lambda quote: quote.step_seconds)
        sizes = _between(known) if len(sizes) > 2 else []
    if not known:
        return None, reason
    return min(known.values(), key=lambda quote: quote.step_seconds), ""


def quotes_on(scenario: Scenario, strategy: Strategy, devices: Sequence[int]) -> tuple[list[Quote], str]:
    """Quotes of every candidate on `devices` that fits, and why the last one did not that does not."""
    quotes, reason = [], ""
    for price in priced(scenario, strategy, devices):
        try:
            quotes.append(price())
        except DoesNotFit as error:
            reason = str(error)
    return quotes, reason


def _sizes(size: int, strategy: Strategy) -> list[int]:
    """1, 2, 4 ... and all devices; where that takes long, all, half and a quarter, or all and a quarter."""
    if strategy.startswith("data+") and size > _MANY:
        return [size // 4, size] if size > _VERY_MANY else [size // 4, size // 2, size]
    return [*(1 << power for power in range(size.bit_length()) if 1 << power < size), size]


def _between(known: dict[int, Quote]) -> list[int]:
    """Sizes halfway between the best one and its neighbours, even ones, so that groups can be formed of them."""
    if not known:
        return []
    sizes = sorted(known)
    best = sizes.index(min(sizes, key=lambda size: known[size].step_seconds))
    neighbours = [sizes[i] for i in (best - 1, best + 1) if 0 <= i < len(sizes)]
    middles = {(sizes[best] + size) // 4 * 2 for size in neighbours}
    return sorted(middle for middle in middles if middle > 1 and middle not in known)


def _left_out(scenario: Scenario, best: Quote) -> list[Rejected]:
    """One entry for every node of which the best quote uses no device."""
    used = {scenario.topology.nodes[device] for device in best.devices}
    names = dict.fromkeys(node for node in scenario.topology.nodes if node not in used)
    return [Rejected(what=node, reason="a step would be no shorter with it") for node in names]
