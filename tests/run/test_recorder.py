"""A long run's record stays small and loses no total."""

import pytest

from evener.record import NodeStep, Step
from evener.run.recorder import StepLog, merge


def step(number: int, loss: float = 1.0, samples: int = 10) -> Step:
    node = NodeStep(
        samples=samples, io_seconds=0.5, compute_seconds=1.0, wait_seconds=0.25, update_seconds=0.125, sent_bytes=7
    )
    return Step(step=number, epoch=0, samples=samples, loss=loss, seconds=2.0, nodes=(node,))


def test_a_short_run_keeps_every_step() -> None:
    log = StepLog(capacity=8)
    for i in range(1, 8):
        log.add(step(i))
    assert log.every == 1
    assert [e.step for e in log.entries] == [1, 2, 3, 4, 5, 6, 7]


def test_a_long_run_sums_neighbours_and_keeps_all_totals() -> None:
    log = StepLog(capacity=8)
    for i in range(1, 1001):
        log.add(step(i))
    assert len(log.entries) <= 8
    assert sum(e.samples for e in log.entries) == 10_000
    assert sum(e.seconds for e in log.entries) == 2000
    assert sum(e.nodes[0].sent_bytes for e in log.entries) == 7000
    assert log.entries[-1].step == 1000


def test_merged_losses_are_weighted_by_samples() -> None:
    assert merge([step(1, 1.0, 10), step(2, 4.0, 5)]).loss == pytest.approx(2.0)
