"""What of a step is fixed is told by two divisions, whatever befalls all nodes alike."""

from __future__ import annotations

import pytest

from evener.oracle.affine_fit import FIXED_PARTS, Timed, plausible, with_fixed_part
from evener.oracle.apportion import Worker


def division(units: tuple[int, ...], phi: float, speeds: tuple[float, ...], slower: float = 1.0) -> list[Timed | None]:
    return [
        Timed(units=n, seconds=slower * speed * (phi + n), error=0.01) if n else None
        for n, speed in zip(units, speeds, strict=True)
    ]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9])
def test_the_fixed_part_is_found_though_all_nodes_have_become_slower(part: float) -> None:
    phi = 32 * part / (1 - part)
    before, now = division((32, 32), phi, (1.0, 3.0)), division((48, 16), phi, (1.0, 3.0), slower=1.7)
    likely = plausible([before], now, 32)
    assert sum(likely) == pytest.approx(1)
    assert abs(sum(weight * one for weight, one in zip(likely, FIXED_PARTS, strict=True)) - part) < 0.1


def test_nothing_is_known_of_one_division() -> None:
    now = division((32, 32), 0.0, (1.0, 3.0))
    assert plausible([], now, 32) == plausible([now], now, 32) == [1 / len(FIXED_PARTS)] * len(FIXED_PARTS)


def test_a_node_that_was_not_timed_says_nothing() -> None:
    before, now = division((64, 0), 0.0, (1.0, 3.0)), division((48, 16), 0.0, (1.0, 3.0))
    likely = plausible([before], now, 32)
    assert max(likely) == pytest.approx(min(likely))  # of a single node all may be what befell it
    assert with_fixed_part(Worker(unit_seconds=2.0), None, 0.5, 32) == Worker(unit_seconds=2.0)


def test_a_cost_with_a_fixed_part_is_what_was_timed() -> None:
    made = with_fixed_part(Worker(unit_seconds=1.0, most=50, least=2), Timed(units=16, seconds=3.0, error=0.0), 0.5, 32)
    assert made.seconds(16) == pytest.approx(3.0)
    assert made.fixed_seconds == pytest.approx(32 * made.unit_seconds)
    assert (made.most, made.least) == (50, 2)
