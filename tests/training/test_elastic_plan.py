"""A divided model's plan for those who are left."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from evener.launch.nodes import NodeSpec
from evener.oracle.apportion import NodeCost
from evener.records.plan import Assignment, Plan, Strategy
from evener.training.elastic.plan import plan_among, vacant_places, with_nodes
from evener.training.planning import Rows, Shape, divide

NODES = [NodeSpec(name=name) for name in "abcd"]
WORKERS = [NodeCost(unit_seconds=seconds) for seconds in (1.0, 1.0, 2.0, 4.0)]


def first(strategy: str, rows: Rows, batch: int = 24) -> Plan:
    """With which the run began."""
    assert strategy in get_args(Strategy)
    size = sum(map(len, rows))
    return divide(Shape(strategy, rows, 1, batch, None), NODES[:size], WORKERS[:size], batch)


@pytest.mark.parametrize(
    ("strategy", "rows", "left", "expected", "samples"),
    [
        ("data+filter", ((0, 1), (2, 3)), "abcd", "data+filter", (18, 6)),
        ("data+filter", ((0, 1), (2, 3)), "acd", "data+filter", (14, 10)),
        ("data+filter", ((0, 1), (2, 3)), "cda", "data+filter", (7, 17)),
        ("data+filter", ((0, 1), (2, 3)), "cd", "filter", (24,)),
        ("data+pipeline", ((0, 1), (2,)), "ac", "data+pipeline", (16, 8)),
        ("pipeline", ((0, 1, 2),), "c", "pipeline", (24,)),
    ],
)
def test_replicas_keep_remaining_nodes_and_samples_follow_speeds(
    strategy: str, rows: Rows, left: str, expected: str, samples: tuple[int, ...]
) -> None:
    plan = plan_among(first(strategy, rows), list(left), "measured")
    assert (plan.strategy, plan.replica_samples) == (expected, samples)
    assert [a.node for a in plan.assignments] == list(left)


def test_plan_among_all_nodes_in_order_is_the_original() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    assert plan_among(plan, list("abcd"), "measured") is plan


def test_shares_set_by_the_user_remain() -> None:
    plan = plan_among(first("data+filter", ((0, 1), (2, 3))), list("abd"), "1,1,1,2")
    assert plan.replica_samples == (12, 12)


def came_for(place: Assignment, node: str, seconds: float) -> Assignment:
    """A new node in a place of the first plan."""
    return msgspec.structs.replace(place, node=node, sample_seconds=seconds)


@pytest.mark.parametrize(
    ("rows", "left", "expected"),
    [
        (((0, 1), (2, 3)), "abcd", ""),
        (((0, 1), (2, 3)), "acd", "b"),
        (((0, 1), (2, 3)), "ac", "bd"),
        (((0, 1), (2, 3)), "cd", "ab"),
        (((0, 1, 2),), "c", "ab"),
    ],
)
def test_place_is_vacant_where_a_replica_has_lost_a_node(rows: Rows, left: str, expected: str) -> None:
    plan = first("data+filter" if len(rows) > 1 else "pipeline", rows)
    assert "".join(place.node for place in vacant_places(plan, list(left), [])) == expected


def test_new_node_fills_the_place_of_a_lost_one() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    (place,) = vacant_places(plan, list("acd"), [])
    came = [came_for(place, "new", 0.5)]
    nodes = [*"acd", "new"]
    assert vacant_places(plan, nodes, came) == []
    among = plan_among(plan, nodes, "measured", came)
    assert among.replica_ranks == ((0, 1), (2, 3))
    assert among.replica_samples == (10, 14)
    assert [a.share for a in among.assignments] == pytest.approx([2 / 3, 1 / 3, 1 / 9, 8 / 9])
    assert [a.node for a in among.assignments] == nodes


def test_returning_node_enlarges_the_replica_of_its_replacement() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    came = [came_for(plan.assignments[1], "new", 1.0)]
    among = plan_among(plan, [*"acd", "new", "b"], "measured", came)
    assert among.replica_ranks == ((0, 1, 2), (3, 4))
    assert vacant_places(plan, [*"cd", "new", "b"], came) == []


def test_new_node_gets_the_average_share_where_shares_are_set() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    came = [came_for(plan.assignments[3], "new", 1.0)]
    among = plan_among(plan, [*"abc", "new"], "1,1,1,3", came)
    assert among.replica_samples == (11, 13)
    assert [a.share for a in among.assignments] == pytest.approx([1 / 2, 1 / 2, 2 / 5, 3 / 5])


def test_plan_lists_all_joined_nodes_as_its_last_ranks() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    came = [came_for(plan.assignments[1], "new", 1.0), came_for(plan.assignments[3], "newer", 1.0)]
    assert with_nodes(plan, []) is plan
    longer = with_nodes(with_nodes(plan, came[:1]), came)
    assert [a.node for a in longer.assignments] == [*"abcd", "new", "newer"]
    assert longer.replica_ranks == ((0, 1, 4), (2, 3, 5))
