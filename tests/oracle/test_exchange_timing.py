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
def test_computing_longer_meanwhile_never_makes_an_exchange_longer(nbytes: float, one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert TIMING.seconds(nbytes, long) <= TIMING.seconds(nbytes, short) <= TIMING.seconds(nbytes)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ((), "points must be at least one"),
        ((ExchangePoint(nbytes=2, seconds=1, beside=0), ExchangePoint(nbytes=1, seconds=1, beside=0)), "increasing"),
    ],
)
def test_points_come_by_increasing_bytes(points: tuple[ExchangePoint, ...], sentence: str) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        ExchangeTiming(kind="exchange", ranks=2, points=points)


def test_no_more_can_be_left_than_the_whole() -> None:
    with pytest.raises(InvalidValue, match="beside must be zero to the whole"):
        ExchangePoint(nbytes=1, seconds=1.0, beside=2.0)
