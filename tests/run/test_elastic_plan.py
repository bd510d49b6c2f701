"""A divided model's plan for those who are left."""

from __future__ import annotations

from typing import get_args

import pytest

from evener.launch.nodes import LocalNode
from evener.oracle.apportion import Worker
from evener.plan import Plan, Strategy
from evener.run.elastic_plan import plan_among
from evener.run.planning import Rows, Shape, divide

NODES = [LocalNode(name=name) for name in "abcd"]
WORKERS = [Worker(unit_seconds=seconds) for seconds in (1.0, 1.0, 2.0, 4.0)]


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
def test_replicas_keep_who_is_left_and_samples_follow_speeds(
    strategy: str, rows: Rows, left: str, expected: str, samples: tuple[int, ...]
) -> None:
    plan = plan_among(first(strategy, rows), list(left), "measured")
    assert (plan.strategy, plan.replica_samples) == (expected, samples)
    assert [a.node for a in plan.assignments] == list(left)


def test_all_nodes_in_their_order_have_the_plan_that_was_made() -> None:
    plan = first("data+filter", ((0, 1), (2, 3)))
    assert plan_among(plan, list("abcd"), "measured") is plan


def test_shares_that_the_user_named_stay() -> None:
    plan = plan_among(first("data+filter", ((0, 1), (2, 3))), list("abd"), "1,1,1,2")
    assert plan.replica_samples == (12, 12)
