"""Who sends what to whom, by strategy: a literal table for each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from evener.records.plan import Assignment, Plan, Strategy
from evener.report.live.routes import MASTER, routes

RING = (1e-4, 2.0**-30)


def plan_of(strategy: Strategy, replicas: Sequence[int], *, members: int = 1, columns: int = 1) -> Plan:
    """Ranks a, b, c ... in replicas of these sizes, which share eight samples; a rank has a stage of its own."""
    ranks = [(replica, place) for replica, size in enumerate(replicas) for place in range(size)]
    return Plan(
        strategy=strategy,
        batch_size=8 * len(replicas),
        members=members,
        columns=columns,
        ring=RING,
        assignments=tuple(
            Assignment(
                rank=rank,
                node="abcdefgh"[rank],
                device="cpu",
                samples=8,
                replica=replica,
                stage=place // members if "pipeline" in strategy else 0,
            )
            for rank, (replica, place) in enumerate(ranks)
        ),
    )


TABLE: dict[str, tuple[Plan, set[str]]] = {
    "one node": (plan_of("serial", [1]), set()),
    "whole models": (plan_of("data", [1, 1, 1]), {"ab gradients", "bc gradients", "ca gradients"}),
    "a pipeline": (
        plan_of("pipeline", [3]),
        {"ab activations", "ba gradients", "bc activations", "cb gradients"},
    ),
    "stages of two": (
        plan_of("pipeline+filter", [4], members=2),
        {
            *("ab parts of layers", "ba parts of layers", "cd parts of layers", "dc parts of layers"),
            *("ac activations", "ca gradients", "bd activations", "db gradients"),
        },
    ),
    "parts of layers": (plan_of("sharded", [3]), {"ab parts of layers", "bc parts of layers", "ca parts of layers"}),
    "rows of images": (
        plan_of("spatial", [3]),
        {
            *("ab edges of images, gradients", "bc edges of images, gradients"),
            *("ba edges of images", "cb edges of images", "ca gradients"),
        },
    ),
    "rows and columns": (
        plan_of("spatial", [4], columns=2),
        {
            *("ab edges of images, gradients", "ba edges of images", "cd edges of images, gradients"),
            *("dc edges of images", "ac edges of images", "ca edges of images", "bd edges of images"),
            *("db edges of images", "bc gradients", "da gradients"),
        },
    ),
    "replicas that hold parts": (
        plan_of("data+filter", [2, 1]),
        {"ab parts of layers, gradients", "ba parts of layers", "bc gradients", "ca gradients"},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_strategy_has_the_expected_routes(name: str) -> None:
    plan, expected = TABLE[name]
    found = routes(plan, [one.node for one in plan.assignments])
    assert {f"{route.source}{route.target} {route.content}" for route in found} == expected
    assert {(route.delay_seconds, route.bytes_per_second) for route in found} <= {(1e-4, 2.0**30)}


def test_departed_nodes_have_no_routes() -> None:
    found = routes(plan_of("data", [1, 1, 1]), ["a", "c"])
    assert [(route.source, route.target) for route in found] == [("a", "c"), ("c", "a")]


@pytest.mark.parametrize("strategy", ["data", "sharded"])
def test_links_without_a_measured_ring_have_no_figures(strategy: Strategy) -> None:
    found = routes(replace(plan_of(strategy, [1, 1] if strategy == "data" else [2]), ring=None), ["a", "b"])
    assert len(found) == 2
    assert {(route.delay_seconds, route.bytes_per_second) for route in found} == {(None, None)}


@pytest.mark.parametrize(("agreement", "content"), [("async", "gradients"), ("diloco", "changes of weights")])
def test_nodes_of_a_protocol_exchange_only_with_the_master(agreement: str, content: str) -> None:
    found = routes(plan_of("data", [1, 1]), ["a", "b"], agreement)
    assert [(route.source, route.target, route.content) for route in found] == [
        ("a", MASTER, content),
        (MASTER, "a", "weights"),
        ("b", MASTER, content),
        (MASTER, "b", "weights"),
    ]
    assert {route.bytes_per_second for route in found} == {None}


def test_sums_divided_by_lines_go_to_owners() -> None:
    plan = plan_of("data", [1, 1, 1])
    plan = replace(plan, line_rates={"a": 4e6, "b": 4e6, "c": 1e6})
    drawn = routes(plan, "abc")
    found = {f"{one.source}{one.target} {content}" for one in drawn for content in one.content.split(", ")}
    assert found == {f"{other}{owner} gradients" for other, owner in ("ab", "ba", "ca", "cb")} | {
        f"{owner}{other} sums of gradients" for other, owner in ("ab", "ba", "ca", "cb")
    }
    without = {f"{one.source}{one.target}" for one in routes(plan, "ab")}
    assert without == {"ab", "ba"}
