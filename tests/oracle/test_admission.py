"""A joining node shortens a step if its computing saves more than its gradient exchange costs."""

from __future__ import annotations

import pytest

from evener.oracle.admission import forecast
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.topology import LinkCost
from evener.oracle.data_parallel import GradientSync

FAST = NodeCost(unit_seconds=0.01)
GIGABIT = GradientSync(gradient_bytes=10**8, alpha=1e-4, beta=8e-9)
SMALL = GradientSync(gradient_bytes=10**4, alpha=1e-4, beta=8e-9)
LINE = LinkCost(5e-4, 2e-8)
"""The link to the master, including the overhead of a message."""


@pytest.mark.parametrize(
    ("new", "samples", "exchange", "line", "is_shorter"),
    [
        pytest.param(FAST, 120, SMALL, LINE, True, id="a third equal one"),
        pytest.param(NodeCost(unit_seconds=0.1), 120, SMALL, LINE, True, id="a slow one of much work"),
        pytest.param(
            NodeCost(unit_seconds=0.1, fixed_seconds=1.0), 120, SMALL, LINE, False, id="its update takes longer"
        ),
        pytest.param(FAST, 120, SMALL, LinkCost(0.2, 2e-8), False, id="a line of 200 ms"),
        pytest.param(FAST, 120, GIGABIT, LINE, False, id="the ring of all gradients takes longer than computing"),
        pytest.param(FAST, 1200, GIGABIT, LINE, True, id="computing takes longer than that"),
        pytest.param(FAST, 1200, GIGABIT, LinkCost(5e-4, 8e-7), False, id="a line of 10 Mbit/s"),
        pytest.param(NodeCost(unit_seconds=0.01, max_units=0), 120, SMALL, LINE, False, id="it holds no sample"),
    ],
)
def test_a_node_joins_only_if_it_shortens_the_step(
    new: NodeCost, samples: int, exchange: GradientSync, line: LinkCost, is_shorter: bool
) -> None:
    prediction = forecast((FAST, FAST), new, (samples, 1), exchange, (LINE, line))
    assert prediction.is_shorter == is_shorter, prediction.summary


def test_step_seconds_follow_the_formulas() -> None:
    prediction = forecast((FAST, FAST), FAST, (120, 2), SMALL, (LINE, LinkCost(5e-4 + 1e-3, 2e-8 + 1e-8)))
    assert prediction.before == pytest.approx(2 * 60 * 0.01 + 2 * (1e-4 + 5000 * 8e-9))
    assert prediction.after == pytest.approx(2 * 40 * 0.01 + 4 * (1.1e-3 + 1e4 / 3 * 1.8e-8))
    assert prediction.summary == "0.805 s per step with it, 1.2 s without it"


def test_norm_exchanges_wait_for_high_latency_links() -> None:
    norms = GradientSync(gradient_bytes=10**4, statistics=20, alpha=1e-4, beta=8e-9)
    prediction = forecast((FAST, FAST), FAST, (120, 1), norms, (LINE, LinkCost(5e-4 + 0.01, 2e-8)))
    assert prediction.after == pytest.approx(0.4 + 4 * (1.01e-2 + 1e4 / 3 * 8e-9) + 20 * 0.01)
