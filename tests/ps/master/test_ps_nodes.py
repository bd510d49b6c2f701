"""Slow work is told from none: a table of signs, and who is late."""

from __future__ import annotations

import pytest

from evener.ps.master.nodes import NodeRecord, stragglers

PATIENCE = 15.0


@pytest.mark.parametrize(
    ("signs", "step_seconds", "now", "late"),
    [
        pytest.param({"a": 0}, {"a": 0.01}, 15.0, [], id="within the patience"),
        pytest.param({"a": 0}, {"a": 0.01}, 15.1, ["a"], id="after it"),
        pytest.param({"a": 0}, {"a": 60}, 74, [], id="amid a step of a minute"),
        pytest.param({"a": 0}, {"a": 60}, 76, ["a"], id="after a step of a minute and the patience"),
        pytest.param({"a": 3600}, {"a": 0.01}, 3610, [], id="an hour of steps, the last one lately"),
        pytest.param({"a": 0, "b": 10}, {"a": 1, "b": 1}, 20, ["a"], id="each by itself"),
        pytest.param({"a": 0, "b": 10}, {"b": 1}, 20, [], id="who has done its work is never late"),
    ],
)
def test_straggler_is_late_after_its_step_time_and_the_patience(
    signs: dict[str, float], step_seconds: dict[str, float], now: float, late: list[str]
) -> None:
    nodes = {name: NodeRecord(name, progress_at=when) for name, when in signs.items()}
    busy = {nodes[name]: seconds for name, seconds in step_seconds.items()}
    assert [node.name for node in stragglers(busy, PATIENCE, now)] == late
