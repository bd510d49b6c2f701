"""Two divisions determine the fixed fraction of a step, even if all nodes change speed together."""

from __future__ import annotations

import pytest

from evener.oracle.apportion import NodeCost
from evener.oracle.rebalance import FIXED_FRACTIONS, NodeTiming, fraction_probabilities, with_fixed_fraction


def division(
    units: tuple[int, ...], phi: float, speeds: tuple[float, ...], slower: float = 1.0
) -> list[NodeTiming | None]:
    return [
        NodeTiming(units=n, seconds=slower * speed * (phi + n), error=0.01) if n else None
        for n, speed in zip(units, speeds, strict=True)
    ]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9])
def test_the_fixed_fraction_is_fitted_even_if_all_nodes_slow_down(part: float) -> None:
    phi = 32 * part / (1 - part)
    before, now = division((32, 32), phi, (1.0, 3.0)), division((48, 16), phi, (1.0, 3.0), slower=1.7)
    probabilities = fraction_probabilities([before], now, 32)
    assert sum(probabilities) == pytest.approx(1)
    assert (
        abs(
            sum(probability * fraction for probability, fraction in zip(probabilities, FIXED_FRACTIONS, strict=True))
            - part
        )
        < 0.1
    )


def test_single_division_does_not_determine_the_fixed_fraction() -> None:
    now = division((32, 32), 0.0, (1.0, 3.0))
    assert (
        fraction_probabilities([], now, 32)
        == fraction_probabilities([now], now, 32)
        == [1 / len(FIXED_FRACTIONS)] * len(FIXED_FRACTIONS)
    )


def test_untimed_node_does_not_determine_the_fixed_fraction() -> None:
    before, now = division((64, 0), 0.0, (1.0, 3.0)), division((48, 16), 0.0, (1.0, 3.0))
    probabilities = fraction_probabilities([before], now, 32)
    assert max(probabilities) == pytest.approx(min(probabilities))  # of a single node all may be what befell it
    assert with_fixed_fraction(NodeCost(unit_seconds=2.0), None, 0.5, 32) == NodeCost(unit_seconds=2.0)


def test_a_cost_with_a_fixed_fraction_reproduces_its_timing() -> None:
    fitted = with_fixed_fraction(
        NodeCost(unit_seconds=1.0, max_units=50, min_units=2), NodeTiming(units=16, seconds=3.0, error=0.0), 0.5, 32
    )
    assert fitted.seconds(16) == pytest.approx(3.0)
    assert fitted.fixed_seconds == pytest.approx(32 * fitted.unit_seconds)
    assert (fitted.max_units, fitted.min_units) == (50, 2)
