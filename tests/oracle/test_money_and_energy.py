"""Money and energy of plans: by hand, and every node of a plan is paid for."""

from __future__ import annotations

import pytest

from evener.oracle.money_and_energy import compare_expenses, rates_of
from evener.oracle.search import search
from evener.records.errors import InvalidValue
from support.imagined_machines import convolutions, model
from support.refusals import refused

NODES = {"node-0": None, "node-1": None}


def test_expenses_are_those_of_the_hours_that_a_plan_takes() -> None:
    ranking = search(model([1, 1], graph=convolutions(depth=6, width=32), alpha=1e-7, beta=1e-11))
    rows = compare_expenses(ranking, {"node-0": 2.0, "node-1": 0.5}, {"node-0": 300.0, "node-1": 100.0})
    data, alone = (next(one for one in rows if one.strategy == name) for name in ("data", "serial"))
    estimate = next(one for one in ranking.ranked if one.strategy == "data")
    hours = estimate.step_seconds * 1e6 / 64 / 3600
    assert data.nodes == ("node-0", "node-1")
    assert (data.hours, data.price, data.energy) == pytest.approx((hours, 2.5 * hours, 0.4 * hours))
    assert alone.nodes == ("node-1",)  # of two equal ones the cheaper
    assert alone.price == pytest.approx(0.5 * alone.hours)
    assert [one.price for one in rows] == sorted(one.price for one in rows)  # type: ignore[type-var]


def test_several_devices_of_a_node_pay_for_it_once() -> None:
    ranking = search(model([1] * 4, per_node=2, graph=convolutions(depth=6, width=32), alpha=1e-7, beta=1e-11))
    (data,) = (one for one in compare_expenses(ranking, {}, dict.fromkeys(NODES, 200.0)) if one.strategy == "data")
    assert data.devices == 4
    assert data.price is None
    assert data.energy == pytest.approx(0.4 * data.hours)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("0.5", {"node-0": 0.5, "node-1": 0.5}),
        ("node-1=0.25, node-0=1", {"node-0": 1.0, "node-1": 0.25}),
    ],
)
def test_number_counts_for_every_node_or_for_the_named_one(text: str, expected: dict[str, float]) -> None:
    assert rates_of(text, "--prices", NODES) == expected


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "much", "node-0=1", "node-0=1,node-7=2", "node-0=1,2", "=", ","])
def test_price_that_is_unclear_is_refused(text: str) -> None:
    with refused(InvalidValue) as error:
        rates_of(text, "--prices", NODES)
    assert error.value.field == "--prices"
