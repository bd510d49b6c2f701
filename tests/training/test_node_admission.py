"""A node that comes to a run of a master's is compared with those that are there, before they make room for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import nn

from evener.comm.signed_store import SignedStore
from evener.config.run_config import RunConfig
from evener.oracle.apportion import Worker
from evener.oracle.cost.topology import LinkCost
from evener.records.errors import NotNeeded
from evener.records.plan import Assignment, Plan
from evener.training import admission
from evener.training.admission import place_for, publish_costs, publish_places, require_beneficial, slowest_link
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
    publish_costs(one, {"a": Worker(unit_seconds=0.01)}, LINE)
    return one


def context_of(store: SignedStore, *, is_of_master: bool = True) -> Any:
    env = SimpleNamespace(has_own_paths=is_of_master, store=store, node=SimpleNamespace(name="new"))
    return SimpleNamespace(env=env, model=nn.Linear(10, 10))


def rank_that(*, is_leader: bool) -> Any:
    return SimpleNamespace(is_leader=is_leader)


def test_one_that_makes_a_step_shorter_is_taken_and_knows_what_later_ones_are_compared_with(store: SignedStore) -> None:
    assert require_beneficial(context_of(store), PLAN, CONFIG, Worker(unit_seconds=0.02)) == LINE


def test_one_that_makes_it_longer_is_not_and_says_what_was_predicted(store: SignedStore) -> None:
    slow = Worker(unit_seconds=0.01, fixed_seconds=2.0)
    with refused(NotNeeded):
        require_beneficial(context_of(store), PLAN, CONFIG, slow)


@pytest.mark.parametrize(
    ("plan", "config", "is_of_master", "own"),
    [
        pytest.param(PLAN, msgspec.structs.replace(CONFIG, shares="1"), True, 2.0, id="shares were named"),
        pytest.param(msgspec.structs.replace(PLAN, ring=None), CONFIG, True, 2.0, id="nothing was measured"),
        pytest.param(PLAN, CONFIG, False, 2.0, id="nodes of one machine"),
    ],
)
def test_where_nothing_can_be_compared_all_are_taken(
    store: SignedStore, plan: Plan, config: RunConfig, is_of_master: bool, own: float
) -> None:
    worker = Worker(unit_seconds=0.01, fixed_seconds=own)
    assert require_beneficial(context_of(store, is_of_master=is_of_master), plan, config, worker) is None


def test_a_node_of_the_plan_is_taken_back_however_slow_it_has_become(store: SignedStore) -> None:
    assert require_beneficial(context_of(store), PLAN, CONFIG, None) == LINE


def test_a_line_is_timed_by_values_that_are_gone_afterwards() -> None:
    store = memory_store()
    group = SimpleNamespace(all_reduce_max=list)
    training: Any = SimpleNamespace(context=context_of(store), plan=PLAN, group=group)
    found = slowest_link(training, CONFIG)
    assert found is not None
    assert 0 < found.alpha < 1
    assert 0 <= found.beta < 1e-6
    assert store.get("elastic/line/new") == b""


def test_a_divided_model_has_a_place_for_a_new_node_where_one_is_gone(store: SignedStore) -> None:
    context = context_of(store)
    publish_places(context.env, rank_that(is_leader=True), [ASSIGNED])
    publish_places(context.env, rank_that(is_leader=False), [])
    assert place_for(context.env, PLAN) == ASSIGNED


def test_a_divided_model_has_none_where_all_are_there(store: SignedStore) -> None:
    context = context_of(store)
    publish_places(context.env, rank_that(is_leader=True), [])
    with refused(NotNeeded):
        place_for(context.env, PLAN)


def test_a_node_of_the_plan_has_its_own_place_in_a_divided_model(store: SignedStore) -> None:
    context = context_of(store)
    context.env.node.name = "a"
    assert place_for(context.env, PLAN) is None
