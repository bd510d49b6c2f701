"""What the master itself has seen between a lease and its contribution bounds how fast a node is believed to be."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest

from evener.agreements.data_assigner import CachedDivision
from evener.agreements.worker_record import MAX_RISE, SpeedEstimate, WorkerRecord, seconds_of

BATCH, UNIT = 400, 0.01
"""Samples of a round; seconds that one of them takes an honest node of usual speed."""


def test_seconds_count_from_the_lease_or_the_previous_contribution() -> None:
    worker = WorkerRecord("a")
    worker.lease_sent(1, 100.0)
    worker.lease_sent(2, 100.0)  # it works on one while the other one waits
    worker.lease_sent(1, 103.0)  # told again, over a new connection
    assert worker.seen(1, 104.0) == 4.0
    assert worker.seen(1, 104.0) is None
    assert worker.seen(2, 109.0) == 5.0
    worker.lease_sent(3, 110.0)
    worker.enter()
    assert worker.seen(3, 111.0) is None


def test_unanswered_leases_are_dropped() -> None:
    worker = WorkerRecord("a")
    for number in range(1000):
        worker.lease_sent(number, 0.0)
    assert worker.seen(0, 1.0) is None
    assert worker.seen(999, 1.0) == 1.0
    assert len(worker.sent_at) < 10


class Imagined(NamedTuple):
    """A node: what a sample truly takes it, what it says, and what every lease costs besides."""

    unit: float
    says: float
    fixed: float = 0.0


def shares_of(nodes: Sequence[Imagined], rounds: int = 300, noise: float = 0.0) -> list[int]:
    """Samples of each in the last of so many rounds, by a clock that only these nodes move."""
    estimates, kept, random = [SpeedEstimate() for _ in nodes], CachedDivision(), Random(1)
    for one, node in zip(estimates, nodes, strict=True):
        one.benchmark(node.says)
    for one in estimates:
        one.bound_claim(UNIT)
    names, shares = [str(i) for i in range(len(nodes))], list[int]()
    for _ in range(rounds):
        shares = list(kept.divide(BATCH, [BATCH] * len(nodes), seconds_of(estimates), names))
        for one, node, n in zip(estimates, nodes, shares, strict=True):
            wobble = random.uniform(1.0, 1.0 + noise)
            one.observe(n, n * node.says * wobble, node.fixed + n * node.unit * wobble)
    return shares


def honest(times_faster: float, fixed: float = 0.0) -> Imagined:
    return Imagined(UNIT / times_faster, UNIT / times_faster, fixed)


@pytest.mark.parametrize("fixed", [0.0, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_shares_follow_speeds_for_any_lease_overhead(fixed: float, noise: float) -> None:
    shares = shares_of([honest(1, fixed), honest(1, fixed), honest(2, fixed), honest(4, fixed)], noise=noise)
    assert shares == pytest.approx([50, 50, 100, 200], rel=0.05 + 0.4 * noise)


@pytest.mark.parametrize("fixed", [1.0, 100.0])
def test_fast_node_with_high_latency_keeps_an_average_share(fixed: float) -> None:
    far = shares_of([honest(1), honest(1), honest(1), honest(4, fixed)])
    assert far[3] >= 99
    slow = shares_of([honest(1), honest(1), honest(1), honest(0.25, fixed)])
    assert slow == pytest.approx([123, 123, 123, 31], abs=5)


def test_node_that_claims_no_time_gets_at_most_twice_the_usual_share() -> None:
    shares = shares_of([honest(1), honest(1), honest(1), Imagined(UNIT, 2e-5)])
    assert shares[3] <= 165  # two of five parts
    for rounds in range(20, 60):
        assert shares_of([honest(1), honest(1), honest(1), Imagined(UNIT, 2e-5)], rounds, noise=0.3)[3] <= 200
    two = shares_of([honest(1), Imagined(UNIT, 2e-5)])
    assert two[1] <= 270  # two of three


def test_share_of_a_new_node_starts_average_and_rises_gradually() -> None:
    liar = Imagined(2e-6, 2e-5)  # it answers at once, with rubbish
    first = [shares_of([honest(1), honest(1), honest(1), liar], rounds)[3] for rounds in range(1, 12)]
    assert first[:9] == [BATCH // 4] * 9  # for as long as a division is kept
    most = [BATCH * times / (3 + times) for times in (MAX_RISE**k for k in range(11))]
    assert all(share <= bound + 3 for share, bound in zip(first, most, strict=True))  # three others have whole samples
    assert first[-1] > 0.9 * BATCH  # nobody can see that it is not so fast: that is for what it sends to show


@pytest.mark.parametrize("times", [2, 4, 10, 50])
def test_fast_node_gets_its_share_within_ten_rounds(times: int) -> None:
    expected = shares_of([honest(1), honest(1), honest(1), honest(times)], 100)
    assert shares_of([honest(1), honest(1), honest(1), honest(times)], 10) == pytest.approx(expected, abs=2)
    assert expected[3] == pytest.approx(BATCH * times / (3 + times), abs=2)


def test_slow_node_that_claims_to_be_fast_gets_an_average_share() -> None:
    assert shares_of([honest(1), honest(1), honest(1), Imagined(8 * UNIT, 2e-5)])[3] <= 101


def test_node_that_claims_to_be_slow_harms_only_itself() -> None:
    shares = shares_of([honest(1), honest(1), honest(1), Imagined(UNIT, 100 * UNIT)])
    assert shares[3] <= 2
    assert min(shares[:3]) >= 132


def test_node_that_stalled_once_keeps_its_share() -> None:
    estimates = [SpeedEstimate(UNIT), SpeedEstimate(UNIT), SpeedEstimate(UNIT / 10)]
    for one in estimates:
        for _ in range(10):
            assert one.seconds is not None
            one.observe(10, 10 * one.seconds, 10 * one.seconds)
    before = seconds_of(estimates)
    estimates[2].observe(10, UNIT, 60.0)
    assert seconds_of(estimates) == pytest.approx(before)
