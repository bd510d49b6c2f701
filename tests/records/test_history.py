"""The history of a run: neighbours are summed when there are too many, and no total is lost."""

from __future__ import annotations

import msgspec
import pytest

from evener.records import history as module
from evener.records.history import Entry, History, NodeWork
from evener.records.plan import Assignment, Plan
from evener.records.record import Epoch, TrainRecord, Validation
from evener.records.schema import MAX_AMOUNT, MAX_FILE_BYTES, encode_noun, parse_noun

PLAN = Plan(strategy="data", batch_size=1, assignments=(Assignment(rank=0, node="a", device="cpu", samples=1),))


def entry(step: int, *names: str, samples: int = 10, loss: float = 2.0, epoch: int = 0, seconds: float = 1.0) -> Entry:
    works = {name: NodeWork(10, 0.25, sent=3) for name in names}
    return Entry(step, epoch, samples, loss * samples, seconds, 1, len(names), len(names) * (step % 2), works)


def known(*names: str) -> History:
    history = History()
    for name in names:
        history.add_node(name)
    return history


def test_step_has_a_column_per_node_and_idle_nodes_wait() -> None:
    history = known("a", "b")
    work = NodeWork(5, 0.5, sent=100, saved=7)
    history.add(Entry(1, 0, 10, 20.0, 1.5, 1, 1, 1, {"a": work}))
    assert history.totals["a"] == work
    [step] = history.steps()
    assert (step.step, step.samples, step.loss, step.seconds, step.staleness) == (1, 10, 2.0, 1.5, 1.0)
    a, b = step.nodes
    assert (a.samples, a.compute_seconds, a.wait_seconds, a.sent_bytes) == (5, 0.5, 1.0, 100)
    assert (b.samples, b.wait_seconds) == (0, 1.5)


def test_appended_entries_are_not_modified_by_summing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 8)
    history, given, same = known("a", "b"), [], []
    for step in range(1, 40):
        given.append(entry(step, "a", "b"))
        same.append(entry(step, "a", "b"))
        history.add(given[-1])
    assert given == same
    assert history.every > 1
    assert sum(one.samples for one in history.steps()) == 390


def test_history_without_news_returns_none() -> None:
    history = History(keeps_news=False)
    history.add_node("a")
    history.add(entry(1, "a"))
    assert history.news(1) is None
    assert history.last_step == 1


def test_phases_and_waiting_are_summed_where_measured() -> None:
    history = known("0")
    work = NodeWork(5, 1.0, sent=7, io_seconds=0.5, update_seconds=0.125, wait_seconds=0.25)
    for step in (1, 2):
        history.add(Entry(step, 0, 5, 5.0, 2.0, 1, nodes={"0": work}))
    news = history.news(1)
    assert news is not None
    [node] = news.nodes
    assert (node.io_seconds, node.compute_seconds, node.update_seconds) == (1.0, 2.0, 0.25)
    assert (node.wait_seconds, node.sent_bytes, history.totals["0"].busy_seconds) == (0.5, 14, 3.25)


def test_node_is_added_once_with_its_start_time() -> None:
    history = known("a")
    history.add(entry(1, "a", seconds=3.0))
    history.add_node("b")
    history.add_node("b")
    assert history.names == ["a", "b"]
    assert history.since == {"a": 0.0, "b": 3.0}


def test_last_loss_is_the_sample_mean_of_the_last_epoch() -> None:
    history = known("a")
    assert history.last_loss() is None
    history.add(entry(1, "a", loss=9.0))
    history.add(entry(2, "a", loss=4.0, samples=30, epoch=1))
    history.add(entry(3, "a", loss=8.0, samples=10, epoch=1))
    assert history.last_loss() == 5.0


def test_a_short_run_keeps_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 8)
    history = known("a")
    for step in range(1, 8):
        history.add(entry(step, "a"))
    assert history.every == 1
    assert [one.step for one in history.steps()] == [1, 2, 3, 4, 5, 6, 7]


def test_a_long_run_sums_neighbours_and_keeps_all_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 8)
    history = known("a")
    for step in range(1, 1001):
        history.add(entry(step, "a", seconds=2.0))
    steps = history.steps()
    assert len(steps) <= 8
    assert sum(one.samples for one in steps) == 10_000
    assert sum(one.seconds for one in steps) == 2000
    assert sum(one.nodes[0].sent_bytes for one in steps) == 3000
    assert steps[-1].step == 1000


def test_too_many_steps_are_summed_two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 4)
    history = known("a")
    for step in range(1, 12):
        history.add(entry(step, "a", loss=float(step)))
    steps = history.steps()
    assert history.every == 4
    assert [step.step for step in steps] == [4, 8, 11]
    assert [step.samples for step in steps] == [40, 40, 30]
    assert [step.seconds for step in steps] == [4.0, 4.0, 3.0]
    assert [step.loss for step in steps] == [2.5, 6.5, 10.0]
    assert [step.staleness for step in steps] == [0.5, 0.5, pytest.approx(2 / 3)]
    assert sum(step.nodes[0].sent_bytes for step in steps) == 33
    assert history.totals["a"].samples == 110


def test_merged_losses_are_weighted_by_samples() -> None:
    history = known("a")
    history.add(entry(1, "a", loss=1.0, samples=10))
    history.add(entry(2, "a", loss=4.0, samples=5))
    news = history.news(1)
    assert news is not None
    assert news.loss == pytest.approx(2.0)


def test_news_covers_events_since_the_last_request() -> None:
    history = known("a")
    assert history.news(1) is None
    for step in (1, 2):
        history.add(entry(step, "a"))
    news = history.news(1)
    assert news is not None
    assert (news.step, news.samples, news.seconds, len(news.nodes)) == (2, 20, 2.0, 1)
    assert history.news(1) is None
    assert len(history.steps()) == 2


def test_decoded_history_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 4)
    one = known("a")
    for step in range(1, 7):
        one.add(entry(step, "a", epoch=step // 3))
    two = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=History)
    assert (two.steps(), two.every, two.seconds, two.names) == (one.steps(), one.every, one.seconds, one.names)
    assert two.epoch == one.epoch == 2
    two.add_node("b")
    for history in (one, two):
        history.add(entry(7, "a"))
    assert [step.step for step in two.steps()] == [step.step for step in one.steps()]
    assert two.since["b"] == 6.0


def test_goodput_is_the_share_of_time_that_was_not_lost() -> None:
    assert History().goodput == 1.0
    assert History(wall_seconds=8.0, lost_seconds=2.0).goodput == 0.75
    assert History(wall_seconds=1.0, lost_seconds=2.0).goodput == 0.0


def test_last_step_is_that_of_the_open_or_last_full_entry() -> None:
    history = History()
    assert history.last_step == 0
    history.add(Entry(step=3, steps=1))
    assert history.last_step == 3
    history.every = 2
    history.add(Entry(step=4, steps=1))
    assert history.last_step == 4


@pytest.mark.parametrize(("nodes", "steps"), [(1, 5000), (300, 1000), (1024, 300), (4096, 70)])
def test_record_of_many_nodes_and_epochs_can_be_read_again(nodes: int, steps: int) -> None:
    history, seconds = known("n0"), 1 / 3e-3
    for step in range(1, 4000):  # of one node, before the others join
        history.add(entry(step, "n0"))
    for number in range(nodes):
        history.add_node(f"n{number}")
    work = NodeWork(MAX_AMOUNT, seconds, MAX_AMOUNT, 0, 0, seconds, seconds, seconds, seconds, MAX_AMOUNT)
    for step in range(4000, 4000 + steps):
        history.add(Entry(step, step, 10, 20.0, 1.0, 1, 1, 0, {f"n{number}": work for number in range(nodes)}))
    for epoch in range(10_000):
        validation = Validation(step=epoch, epoch=epoch, loss=abs(epoch - 4321.0), accuracy=None, seconds=1 / 3)
        history.add_validation(validation)
        history.add_epoch(Epoch(step=epoch, epoch=epoch, loss=validation.loss, validation=validation))
    record = history.record((), plan=PLAN, task="t", seed=0, epochs=1, precision="", seconds=1.0, startup_seconds=0.0)
    data = encode_noun(record)
    assert len(data) <= MAX_FILE_BYTES
    assert parse_noun(data, TrainRecord) == record
    assert (record.steps[-1].step, record.steps[-1].epoch) == (3999 + steps, 3999 + steps)
    for kept in ([one.epoch for one in record.validations], [one.epoch for one in history.epochs]):
        assert len(kept) < 4096
        assert kept == sorted(set(kept))
        assert {0, 4321, 9999} <= set(kept)


def test_nodes_that_join_lose_no_step_of_an_odd_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NODE_STEPS", 24)
    history = known("a")
    for step in range(1, 8):
        history.add(entry(step, "a"))
    for name in "bcdefgh":
        history.add_node(name)
    assert len(history.entries) < 3
    history.add(entry(8, "a"))
    assert [(one.step, one.samples) for one in history.steps()] == [(4, 40), (8, 40)]
