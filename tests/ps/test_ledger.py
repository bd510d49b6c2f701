"""The ledger: what goes into the weights counts, neighbours are summed when there are too many, nothing is lost."""

from __future__ import annotations

import msgspec
import pytest

from evener.ps import ledger as module
from evener.ps.entry import Work
from evener.ps.ledger import Ledger, LedgerState
from evener.sync.messages import Update


def update(version: int, *names: str, samples: int = 10, loss: float | None = 2.0, epoch: int = 0) -> Update:
    return Update(
        version=version, epoch=epoch, num_samples=samples, loss=loss, staleness=dict.fromkeys(names, version % 2)
    )


def known(*names: str) -> Ledger:
    ledger = Ledger()
    for name in names:
        ledger.know(name)
    return ledger


def test_work_counts_when_it_goes_into_the_weights_and_not_before() -> None:
    ledger = known("a", "b")
    ledger.contributed("a", Work(5, 0.5, sent=100, saved=7))
    assert ledger.totals["a"].samples == 0
    ledger.updated(update(1, "a"), seconds=1.5)
    assert ledger.totals["a"] == Work(5, 0.5, sent=100, saved=7)
    [step] = ledger.steps()
    assert (step.step, step.samples, step.loss, step.seconds, step.staleness) == (1, 10, 2.0, 1.5, 1.0)
    a, b = step.nodes
    assert (a.samples, a.compute_seconds, a.wait_seconds, a.sent_bytes) == (5, 0.5, 1.0, 100)
    assert (b.samples, b.wait_seconds) == (0, 1.5)


def test_what_was_refused_never_counts() -> None:
    ledger = known("a")
    ledger.contributed("a", Work(5, 0.5, sent=100))
    ledger.refused("a")
    ledger.updated(update(1, "a"), seconds=1.0)
    assert ledger.totals["a"] == Work()


def test_a_node_is_known_once_and_from_when() -> None:
    ledger = known("a")
    ledger.updated(update(1, "a"), seconds=3.0)
    assert ledger.know("b")
    assert not ledger.know("b")
    assert ledger.names == ["a", "b"]
    assert ledger.since == {"a": 0.0, "b": 3.0}
    ledger.sent("b", 50, 2)
    ledger.sent("stranger", 50, 2)
    assert ledger.totals["b"] == Work(received=50, saved=2)
    assert "stranger" not in ledger.totals


def test_an_update_without_a_loss_has_that_of_the_one_before() -> None:
    ledger = known("a")
    ledger.updated(update(1, "a", loss=4.0), 1.0)
    ledger.updated(update(2, "a", loss=None), 1.0)
    assert [step.loss for step in ledger.steps()] == [4.0, 4.0]


def test_the_last_loss_is_the_mean_over_the_samples_of_the_last_epoch() -> None:
    ledger = known("a")
    assert ledger.last_loss() is None
    ledger.updated(update(1, "a", loss=9.0), 1.0)
    ledger.updated(update(2, "a", loss=4.0, samples=30, epoch=1), 1.0)
    ledger.updated(update(3, "a", loss=8.0, samples=10, epoch=1), 1.0)
    assert ledger.last_loss() == 5.0


def test_too_many_updates_are_summed_two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 4)
    ledger = known("a")
    for version in range(1, 12):
        ledger.contributed("a", Work(10, 0.25, sent=3))
        ledger.updated(update(version, "a", loss=float(version)), seconds=1.0)
    steps = ledger.steps()
    assert ledger.every == 4
    assert [step.step for step in steps] == [4, 8, 11]
    assert [step.samples for step in steps] == [40, 40, 30]
    assert [step.seconds for step in steps] == [4.0, 4.0, 3.0]
    assert [step.loss for step in steps] == [2.5, 6.5, 10.0]
    assert [step.staleness for step in steps] == [0.5, 0.5, pytest.approx(2 / 3)]
    assert sum(step.nodes[0].sent_bytes for step in steps) == 33
    assert ledger.totals["a"].samples == 110


def test_news_are_what_happened_since_they_were_asked_for_last() -> None:
    ledger = known("a")
    assert ledger.news(1) is None
    for version in (1, 2):
        ledger.updated(update(version, "a"), 1.0)
    step = ledger.news(1)
    assert step is not None
    assert (step.step, step.samples, step.seconds, len(step.nodes)) == (2, 20, 2.0, 1)
    assert ledger.news(1) is None
    assert len(ledger.steps()) == 2


def test_a_ledger_that_was_written_down_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 4)
    one = known("a")
    for version in range(1, 7):
        one.updated(update(version, "a", epoch=version // 3), 1.0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(one.state()), type=LedgerState)
    two = Ledger(state)
    assert (two.steps(), two.every, two.seconds, two.names) == (one.steps(), one.every, one.seconds, one.names)
    two.know("b")
    for ledger in (one, two):
        ledger.updated(update(7, "a"), 1.0)
    assert [step.step for step in two.steps()] == [step.step for step in one.steps()]
    assert two.since["b"] == 6.0
