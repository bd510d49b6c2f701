"""A node that comes to a run of a master's is compared with those that are there, before they make room for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import nn

from evener.comm.signed_store import SignedStore
from evener.config.run_config import RunConfig
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.topology import LinkCost
from evener.records.errors import NotNeeded
from evener.records.plan import Assignment, Plan
from evener.training import admission
from evener.training.admission import (
    exchange_of,
    place_for,
    publish_costs,
    publish_places,
    require_beneficial,
    slowest_link,
)
from evener.training.training import follows_speeds
from support.refusals import refused
from support.stores import memory_store

ASSIGNED = Assignment(rank=0, node="a", device="cpu", samples=100, sample_seconds=0.01)
PLAN = Plan(strategy="data", batch_size=100, assignments=(ASSIGNED,), ring=(1e-4, 8e-9))
CONFIG = RunConfig(task="any")
LINE = LinkCost(1e-3, 1e-8)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SignedStore:
    """Of a run of a master's, with what its leader has left; every line is as fast as any."""
    monkeypatch.setattr(admission, "_link_cost", lambda *_: LINE)
    one = memory_store()
    publish_costs(one, {"a": NodeCost(unit_seconds=0.01)}, LINE)
    return one


def context_of(store: SignedStore, *, is_of_master: bool = True, leaving: tuple[str, ...] = ()) -> Any:
    env = SimpleNamespace(has_own_paths=is_of_master, store=store, node=SimpleNamespace(name="new"), leaving=leaving)
    return SimpleNamespace(env=env, model=nn.Linear(10, 10))


def beneficial(context: Any, plan: Plan, config: RunConfig, cost: NodeCost | None) -> LinkCost | None:
    exchange, follows = exchange_of(context.model), follows_speeds(config, plan)
    return require_beneficial(context.env, plan, exchange, cost, follows_speeds=follows)


def rank_that(*, is_leader: bool) -> Any:
    return SimpleNamespace(is_leader=is_leader)


def test_node_that_shortens_the_step_is_admitted_with_a_reference(store: SignedStore) -> None:
    assert beneficial(context_of(store), PLAN, CONFIG, NodeCost(unit_seconds=0.02)) == LINE


def test_node_that_lengthens_the_step_is_refused_with_predictions(store: SignedStore) -> None:
    slow = NodeCost(unit_seconds=0.01, fixed_seconds=2.0)
    with refused(NotNeeded):
        beneficial(context_of(store), PLAN, CONFIG, slow)


def test_slow_node_is_admitted_if_all_others_are_about_to_leave(store: SignedStore) -> None:
    slow = NodeCost(unit_seconds=0.01, fixed_seconds=2.0)
    assert beneficial(context_of(store, leaving=("a",)), PLAN, CONFIG, slow) == LINE
    publish_costs(store, {"a": NodeCost(unit_seconds=0.01), "b": NodeCost(unit_seconds=0.01)}, LINE)
    with refused(NotNeeded):
        beneficial(context_of(store, leaving=("a",)), PLAN, CONFIG, slow)


@pytest.mark.parametrize(
    ("plan", "config", "is_of_master", "own"),
    [
        pytest.param(PLAN, msgspec.structs.replace(CONFIG, shares="1"), True, 2.0, id="shares were named"),
        pytest.param(msgspec.structs.replace(PLAN, ring=None), CONFIG, True, 2.0, id="nothing was measured"),
        pytest.param(PLAN, CONFIG, False, 2.0, id="nodes of one machine"),
    ],
)
def test_all_nodes_are_admitted_without_a_comparison(
    store: SignedStore, plan: Plan, config: RunConfig, is_of_master: bool, own: float
) -> None:
    worker = NodeCost(unit_seconds=0.01, fixed_seconds=own)
    assert beneficial(context_of(store, is_of_master=is_of_master), plan, config, worker) is None


def test_node_of_the_plan_is_readmitted_at_any_speed(store: SignedStore) -> None:
    assert beneficial(context_of(store), PLAN, CONFIG, None) == LINE


def test_link_timing_removes_its_values() -> None:
    store = memory_store()
    group: Any = SimpleNamespace(all_reduce_max=list)
    found = slowest_link(context_of(store).env, group, PLAN, follows_speeds=follows_speeds(CONFIG, PLAN))
    assert found is not None
    assert 0 < found.alpha < 1
    assert 0 <= found.beta < 1e-6
    assert store.get("elastic/line/new") == b""


def test_divided_model_has_a_place_where_a_node_is_lost(store: SignedStore) -> None:
    context = context_of(store)
    publish_places(context.env, rank_that(is_leader=True), [ASSIGNED])
    publish_places(context.env, rank_that(is_leader=False), [])
    assert place_for(context.env, PLAN) == ASSIGNED


def test_divided_model_has_no_place_if_all_nodes_are_present(store: SignedStore) -> None:
    context = context_of(store)
    publish_places(context.env, rank_that(is_leader=True), [])
    with refused(NotNeeded):
        place_for(context.env, PLAN)


def test_node_of_the_plan_has_its_own_place_in_a_divided_model(store: SignedStore) -> None:
    context = context_of(store)
    context.env.node.name = "a"
    assert place_for(context.env, PLAN) is None
