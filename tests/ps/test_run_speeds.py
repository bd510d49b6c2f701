"""What the master itself has seen between a lease and its contribution bounds what a node says of its speed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from evener.ps.nodes import Nodes
from evener.ps.run_speeds import RunSpeeds
from evener.sync.worker_record import LEAST_WAITING, SpeedEstimate

UNIT = 0.01
"""Seconds that a sample truly takes."""


class Times:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_counted_from_the_lease_or_from_the_contribution_before() -> None:
    clock = Times()
    speeds = RunSpeeds(cast(Any, None), Nodes(10.0), clock)
    speeds.given("a", 1)
    speeds.given("a", 2)  # it works on one while the other one waits
    clock.now = 103.0
    speeds.given("a", 1)  # told again, over a new connection
    speeds.arriving("a", 1)
    clock.now = 104.0  # the rest of it has come
    assert speeds.seen("a", 1) == 3.0
    assert speeds.seen("a", 1) is None
    clock.now = 108.0
    speeds.arriving("a", 2)
    assert speeds.seen("a", 2) == 5.0
    speeds.given("a", 3)
    speeds.forget("a")
    speeds.arriving("a", 3)
    assert speeds.seen("a", 3) is None
    assert speeds.seen("nobody", 3) is None


def told(estimate: SpeedEstimate, num_samples: int, *, says: float, line: float = 0.0) -> float:
    """A lease of so many samples, of which the node says that one took so long."""
    estimate.observe(num_samples, max(1e-9, says * num_samples), UNIT * num_samples + line)
    assert estimate.seconds is not None
    return estimate.seconds


@pytest.mark.parametrize("line", [0.0, 0.3, 30.0])
def test_an_honest_node_is_believed_whatever_its_line_takes(line: float) -> None:
    estimate = SpeedEstimate()
    for num_samples in (10, 10, 10, 40, 40, 5, 200, 200, 200, 200):
        assert told(estimate, num_samples, says=UNIT, line=line) == pytest.approx(UNIT)
    told(estimate, 200, says=UNIT, line=line + 5.0)  # it was held up once
    assert estimate.seconds == pytest.approx(UNIT)


def test_who_says_to_compute_in_no_time_gets_a_few_times_its_share_at_most() -> None:
    estimate, share = SpeedEstimate(), 100
    estimate.benchmark(1e-9)
    estimate.bound_claim(UNIT)
    for _ in range(300):  # rounds of 400 samples, with three others
        unit = told(estimate, share, says=0.0)
        share = round(400 * (1 / unit) / (3 / UNIT + 1 / unit))
    assert 250 <= share <= 300


def test_who_says_to_be_slow_is_believed_up_to_what_was_seen() -> None:
    estimate = SpeedEstimate()
    for _ in range(50):
        told(estimate, 10, says=1000.0)
    assert estimate.seconds == pytest.approx(UNIT)


def test_who_has_shown_nothing_is_not_faster_than_is_usual_and_what_it_shows_counts_at_once() -> None:
    estimate = SpeedEstimate()
    estimate.benchmark(UNIT / 1e6)
    estimate.bound_claim(4 * UNIT)
    assert estimate.seconds == 4 * UNIT
    assert not estimate.is_measured
    assert told(estimate, 100, says=UNIT) == pytest.approx(UNIT)
    assert estimate.is_measured
    estimate.bound_claim(4 * UNIT)
    assert estimate.seconds == pytest.approx(UNIT)


def test_waiting_that_a_busy_machine_takes_is_nobodys_slowness() -> None:
    estimate = SpeedEstimate()
    for wait in (0.0, 0.0, 0.0, *[LEAST_WAITING] * 9):
        assert told(estimate, 1, says=UNIT, line=wait) == pytest.approx(UNIT)
