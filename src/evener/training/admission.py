"""Admission of nodes to a master's run: a new node joins if it makes steps shorter. The other ranks do not wait.

    initial ranks    measure the slowest connection to the master       before the first step
    the leader       publishes the costs of the present nodes           in every generation
    a new node       times the model and its connection, and predicts a step

With `--shares`, every new node takes part; nodes that the plan knows do so, too. Nodes that are about to leave do not
count. A divided model stays divided among as many nodes as the run began with: a new node takes the place of a
lost one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from torch import nn

from evener.comm.group import Group
from evener.comm.signed_store import SignedStore
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.admission import forecast
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.topology import LinkCost
from evener.oracle.data_parallel import GradientSync
from evener.parallel.shared_statistics import statistics_exchanges
from evener.records.errors import NotNeeded
from evener.records.plan import Assignment, Plan
from evener.records.schema import Part
from evener.training.costs import gradient_bytes

_PRESENT, _PLACES = "elastic/present", "elastic/places"
_BYTES, _MESSAGES = 2**19, 3


class _Present(Part, frozen=True, kw_only=True):
    """The present nodes, with which a new one is compared.

    Attributes:
        costs: of samples, on the present nodes.
        link: latency in seconds, and seconds per byte, of the slowest connection of an initial rank to the master.
    """

    costs: dict[str, NodeCost]
    link: tuple[float, float]


def slowest_link(env: RankEnvironment, group: Group, plan: Plan, *, follows_speeds: bool) -> LinkCost | None:
    """Return the slowest rank's connection to the master; None if all nodes are admitted. All ranks call this.

    Args:
        env: of this rank.
        group: all ranks.
        plan: the first plan of the run.
        follows_speeds: whether samples are divided by measured speeds.
    """
    store = _store_to_compare(env, plan, follows_speeds=follows_speeds)
    if store is None:
        return None
    link = _link_cost(store, env.node.name)
    return LinkCost(*group.all_reduce_max([link.alpha, link.beta]))


def publish_costs(store: SignedStore | None, costs: Mapping[str, NodeCost], link: LinkCost | None) -> None:
    """Publish the costs that new nodes are compared with, if they are compared."""
    if link is not None and store is not None:
        store.set(_PRESENT, msgspec.json.encode(_Present(costs=dict(costs), link=(link.alpha, link.beta))).decode())


def require_beneficial(
    env: RankEnvironment, plan: Plan, exchange: GradientSync, cost: NodeCost | None, *, follows_speeds: bool
) -> LinkCost | None:
    """Require that steps are shorter with this rank's node; return the result of `slowest_link` on initial ranks.

    Args:
        env: of a rank that joins later.
        plan: the first plan of the run.
        exchange: bytes of gradients of a step, and exchanges of statistics; the plan has the cost of the ring.
        cost: costs of this node; None for a node of the plan, which is always admitted.
        follows_speeds: whether samples are divided by measured speeds.

    Raises:
        NotNeeded: a step is predicted to be no shorter.
    """
    store = _store_to_compare(env, plan, follows_speeds=follows_speeds)
    if store is None:
        return None
    assert plan.ring is not None
    present = store.get_as(_PRESENT, _Present)
    link = LinkCost(*present.link)
    staying = tuple(one for node, one in present.costs.items() if node not in env.leaving)
    if cost is not None and staying:
        exchange = replace(exchange, alpha=plan.ring[0], beta=plan.ring[1])
        links = link, _link_cost(store, env.node.name)
        prediction = forecast(staying, cost, (plan.micro_batch_size, plan.accumulate), exchange, links)
        if not prediction.is_shorter:
            raise NotNeeded(f"a step would not be shorter: {prediction.summary}")
    return link


def publish_places(env: RankEnvironment, group: Group, places: Sequence[Assignment]) -> None:
    """Have the leader of a master's run publish the places of lost nodes in a divided model."""
    if group.is_leader and env.has_own_paths and env.store is not None:
        env.store.set(_PLACES, msgspec.json.encode(places).decode())


def place_for(env: RankEnvironment, plan: Plan) -> Assignment | None:
    """Return the vacant place for this rank's node in a divided model; None if the first plan, `plan`, names it.

    Raises:
        NotNeeded: no place is vacant.
    """
    if env.node.name in [one.node for one in plan.assignments]:
        return None
    assert env.store is not None
    places = env.store.get_as(_PLACES, list[Assignment])
    if not places:
        raise NotNeeded(f"the model is divided among {len(plan.assignments)} nodes, and as many are there")
    return places[0]


def _store_to_compare(env: RankEnvironment, plan: Plan, *, follows_speeds: bool) -> SignedStore | None:
    """Return the store if nodes are compared: in a master's run whose samples are divided by measured speeds."""
    return env.store if env.has_own_paths and plan.ring is not None and follows_speeds else None


def exchange_of(model: nn.Module, batches: float = 1) -> GradientSync:
    """Return what a batch of `model` exchanges if gradients are exchanged once in this number of `batches`."""
    return GradientSync(
        gradient_bytes=round(gradient_bytes(model) / batches), statistics=statistics_exchanges(model)[0]
    )


def _link_cost(store: SignedStore, node: str) -> LinkCost:
    """Measure this rank's connection to the master: the best of a few messages, as it may be busy."""
    key = f"elastic/line/{node}"

    def seconds(nbytes: int) -> float:
        begin = time.perf_counter()
        store.set(key, bytes(nbytes))
        return time.perf_counter() - begin

    seconds(0)  # the first value of a key is written down there
    small, large = (min(seconds(nbytes) for _ in range(_MESSAGES)) for nbytes in (0, _BYTES))
    seconds(0)
    return LinkCost(small / 2, max(0.0, large - small) / _BYTES)
