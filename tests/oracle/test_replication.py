"""The replication interval by Young's rule."""

from __future__ import annotations

import pytest

from evener.oracle.replication import replication_interval


@pytest.mark.parametrize(
    ("copy", "step", "fault", "steps"), [(0.8, 1.0, 3600.0, 76), (0.01, 0.1, 3600.0, 85), (5.0, 900.0, 3600.0, 1)]
)
def test_intervals_match_literal_values(copy: float, step: float, fault: float, steps: int) -> None:
    assert replication_interval(copy, step, fault) == steps


def test_no_other_interval_costs_less_time() -> None:
    copy, step, fault = 0.8, 1.0, 3600.0

    def cost(every: int) -> float:  # of a second: copies, and half an interval of steps at each loss
        return copy / (every * step) + every * step / 2 / fault

    best = replication_interval(copy, step, fault)
    assert cost(best) <= min(cost(every) for every in range(1, 1000)) * (1 + 1e-3)
