"""Whether a run of a master's needs a node that comes: it is compared with those that are there, and nobody waits.

    founders      how slow is the slowest of our lines to the master?       measured before the first step
    the leader    what do samples cost those who are there?                 left at the master in every generation
    a newcomer    times the model and its line, forecasts a step            before anybody makes room for it

Where the user named shares, every node that comes takes part; nodes that the plan knows do so, too. A model that is
divided is so among as many nodes as the run began with: a new one comes in the place of one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from evener.comm.group import Group
from evener.comm.signed_store import SignedStore
from evener.config.run_config import RunConfig
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.admission import Forecast, forecast
from evener.oracle.apportion import Worker
from evener.oracle.cost.topology import LinkCost
from evener.oracle.data_parallel import GradientSync
from evener.parallel.shared_statistics import statistics_exchanges
from evener.records.errors import NotNeeded
from evener.records.plan import Assignment, Plan
from evener.records.schema import Part
from evener.training.context import RankContext
from evener.training.costs import gradient_bytes
from evener.training.training import Training, follows_speeds

_PRESENT, _PLACES = "elastic/present", "elastic/places"
_BYTES, _MESSAGES = 2**19, 3


class _Present(Part, frozen=True, kw_only=True):
    """What a newcomer is compared with.

    Attributes:
        costs: of samples, on the nodes that are there.
        line: latency in seconds, and seconds a byte, of the slowest of the founders' lines to the master.
    """

    costs: dict[str, Worker]
    line: tuple[float, float]


def slowest_line(training: Training, config: RunConfig) -> LinkCost | None:
    """Of all ranks' lines to the master; all ranks call this. None: newcomers are not compared."""
    store = _store_to_ask(training.context, training.plan, config)
    if store is None:
        return None
    own = _line_cost(store, training.context.env.node.name)
    return LinkCost(*training.group.all_reduce_max([own.alpha, own.beta]))


def leave_present(store: SignedStore | None, costs: Mapping[str, Worker], line: LinkCost | None) -> None:
    """Leave what newcomers are compared with, if they are."""
    if line is not None and store is not None:
        store.set(_PRESENT, msgspec.json.encode(_Present(costs=dict(costs), line=(line.alpha, line.beta))).decode())


def require_needed(context: RankContext, plan: Plan, config: RunConfig, own: Worker | None) -> LinkCost | None:
    """Return if a step is shorter with this rank's node, or that is not asked; what `slowest_line` returned there.

    Args:
        context: of a rank that comes later.
        plan: with which the run began.
        config: of the run.
        own: what samples cost this node; None for one of the plan's.

    Raises:
        NotNeeded: a step is predicted to be no shorter.
    """
    store = _store_to_ask(context, plan, config)
    if store is None:
        return None
    present = msgspec.json.decode(store.get(_PRESENT), type=_Present)
    line = LinkCost(*present.line)
    if own is not None:
        found = _forecast(context, plan, present, own, _line_cost(store, context.env.node.name))
        if not found.is_shorter:
            raise NotNeeded(f"a step would not be shorter: {found.summary}")
    return line


def leave_places(env: RankEnvironment, group: Group, places: Sequence[Assignment]) -> None:
    """Have the leader of a master's run whose model is divided leave the places of nodes that are gone."""
    if group.is_leader and env.has_own_paths and env.store is not None:
        env.store.set(_PLACES, msgspec.json.encode(places).decode())


def place_for(env: RankEnvironment, plan: Plan) -> Assignment | None:
    """The place that this rank's node comes in, of a divided model; None: it has its own in the first plan, `plan`.

    Raises:
        NotNeeded: none is vacant.
    """
    if env.node.name in [one.node for one in plan.assignments]:
        return None
    assert env.store is not None
    places = msgspec.json.decode(env.store.get(_PLACES), type=list[Assignment])
    if not places:
        raise NotNeeded(f"the model is divided among {len(plan.assignments)} nodes, and as many are there")
    return places[0]


def _store_to_ask(context: RankContext, plan: Plan, config: RunConfig) -> SignedStore | None:
    """That of a master's run whose samples are divided by measured speeds."""
    is_asked = context.env.has_own_paths and plan.ring is not None and follows_speeds(config, plan)
    return context.env.store if is_asked else None


def _forecast(context: RankContext, plan: Plan, present: _Present, own: Worker, line: LinkCost) -> Forecast:
    assert plan.ring is not None
    exchange = GradientSync(
        gradient_bytes=gradient_bytes(context.model),
        statistics=statistics_exchanges(context.model)[0],
        alpha=plan.ring[0],
        beta=plan.ring[1],
    )
    batch = plan.micro_batch_size, plan.accumulate
    return forecast(tuple(present.costs.values()), own, batch, exchange, (LinkCost(*present.line), line))


def _line_cost(store: SignedStore, node: str) -> LinkCost:
    """Of this rank's line to the master: the best of a few messages, as others may be at work."""
    key = f"elastic/line/{node}"

    def seconds(nbytes: int) -> float:
        begin = time.perf_counter()
        store.set(key, bytes(nbytes))
        return time.perf_counter() - begin

    seconds(0)  # the first value of a key is written down there
    small, large = (min(seconds(nbytes) for _ in range(_MESSAGES)) for nbytes in (0, _BYTES))
    seconds(0)
    return LinkCost(small / 2, max(0.0, large - small) / _BYTES)
