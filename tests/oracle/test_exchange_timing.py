"""Seconds of exchanges between the measured sizes, above and below them, and beside computing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.replay import ExchangePoint, ExchangeTiming
from evener.records.errors import InvalidValue

TIMING = ExchangeTiming(
    kind="exchange",
    ranks=2,
    points=(
        ExchangePoint(nbytes=1000, seconds=1.0, beside=0.5),
        ExchangePoint(nbytes=3000, seconds=2.0, beside=0.5),
        ExchangePoint(nbytes=4000, seconds=6.0, beside=4.0),
    ),
)


@pytest.mark.parametrize(
    ("nbytes", "meanwhile", "expected"),
    [
        (1000, 0, 1.0),
        (2000, 0, 1.5),
        (3500, 0, 4.0),
        (8000, 0, 12.0),  # in proportion above the largest
        (10, 0, 1.0),  # as the smallest below it
        (2000, 0.75, 0.75),
        (2000, 100, 0.5),  # what nothing hides
        (3500, 100, 2.25),
    ],
)
def test_seconds_are_interpolated_and_hidden_as_measured(nbytes: int, meanwhile: float, expected: float) -> None:
    assert TIMING.seconds(nbytes, meanwhile) == pytest.approx(expected)


@given(st.floats(0, 1e5), st.floats(0, 10), st.floats(0, 10))
def test_longer_computing_never_lengthens_an_exchange(nbytes: float, one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert TIMING.seconds(nbytes, long) <= TIMING.seconds(nbytes, short) <= TIMING.seconds(nbytes)


@pytest.mark.parametrize(
    "points", [(), (ExchangePoint(nbytes=2, seconds=1, beside=0), ExchangePoint(nbytes=1, seconds=1, beside=0))]
)
def test_points_must_be_in_order_of_increasing_bytes(points: tuple[ExchangePoint, ...]) -> None:
    with pytest.raises(InvalidValue) as caught:
        ExchangeTiming(kind="exchange", ranks=2, points=points)
    assert caught.value.field == "points"


def test_the_unhidden_part_is_at_most_the_complete_exchange() -> None:
    with pytest.raises(InvalidValue) as caught:
        ExchangePoint(nbytes=1, seconds=1.0, beside=2.0)
    assert (caught.value.field, caught.value.value) == ("beside", 2.0)
