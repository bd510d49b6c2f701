"""The first strategy is taken unless it does not fit or another is much faster: a pure choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evener.errors import DoesNotFit
from evener.run.planning import MUCH, choose

NAMES = ["data", "sharded", "pipeline"]


def estimate(strategy: str, seconds: float, accumulate: int = 1) -> Any:
    return SimpleNamespace(strategy=strategy, step_seconds=seconds, accumulate=accumulate)


@pytest.mark.parametrize(
    ("estimates", "chosen"),
    [
        ([], "data"),
        ([estimate("data", 1.0), estimate("sharded", 2.0)], "data"),
        ([estimate("sharded", 1.0), estimate("data", MUCH)], "data"),
        ([estimate("sharded", 1.0), estimate("data", MUCH + 0.01)], "sharded"),
        ([estimate("pipeline", 1.0), estimate("sharded", 1.1), estimate("serial", 9.0)], "pipeline"),
        ([estimate("data", 0.5, accumulate=2), estimate("sharded", 1.0)], "sharded"),
    ],
    ids=["no prices", "slower", "not much faster", "much faster", "the fastest", "whole models fit only in parts"],
)
def test_the_first_is_taken_unless_another_is_much_faster(estimates: list[Any], chosen: str) -> None:
    assert choose(NAMES, "", estimates) == chosen


def test_what_no_node_holds_is_cut_into_stages_if_it_may_be() -> None:
    assert choose(NAMES, "node-1: too large", []) == "pipeline"
    with pytest.raises(DoesNotFit, match="node-1: too large"):
        choose(["data"], "node-1: too large", [])
