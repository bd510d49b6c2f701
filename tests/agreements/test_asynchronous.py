"""Each at its own pace: contributions count at once, staleness is known, and bounded where it shall be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.agreements.messages import SampleRange
from evener.agreements.settings import AgreementSettings, Sgd
from support.server_inboxes import Desk

SGD = Sgd(learning_rate=1.0)
ASYNC = AgreementSettings(batch=10, outer=SGD, staleness=None)


def bounded(staleness: int) -> AgreementSettings:
    return AgreementSettings(batch=1, outer=SGD, staleness=staleness)


def test_contribution_counts_at_once_and_only_its_worker_is_answered() -> None:
    desk = Desk(ASYNC)
    desk.admit("a", "b")
    answers = desk.push("a", 3.0)
    assert (desk.server.version, desk.value, set(answers)) == (1, -3.0, {"a"})
    assert (answers["a"][0].verdict, desk.weights_for("a"), desk.leases["a"][0].version) == ("applied", -3.0, 1)


def test_staleness_is_the_number_of_versions_in_between() -> None:
    desk = Desk(ASYNC)
    desk.admit("a", "b")
    desk.push("a", 1.0)
    desk.push("a", 1.0)
    desk.push("b", 1.0)
    assert desk.last.updates[0].staleness == {"b": 2}
    desk.push("b", 1.0)
    assert desk.last.updates[0].staleness == {"b": 0}
    tally = desk.server.workers["b"].totals
    assert (tally.staleness, tally.most_stale, tally.applied) == (2, 2, 2)


def test_non_finite_update_is_rejected_and_its_worker_continues() -> None:
    desk = Desk(ASYNC)
    desk.admit("a")
    answers = desk.push("a", math.nan)
    assert (desk.server.version, desk.value, desk.last.updates) == (0, 0.0, [])
    assert (answers["a"][0].verdict, answers["a"][0].lease) == ("refused", desk.leases["a"][0])
    desk.push("a", 1.0)
    assert desk.value == -1.0


def test_repeated_contribution_is_answered_but_not_counted() -> None:
    desk = Desk(ASYNC)
    desk.admit("a")
    lease = desk.leases["a"][0]
    desk.push("a", 1.0)
    held = list(desk.leases["a"])
    (again,) = desk.push("a", 1.0, lease)["a"]
    assert (again.verdict, again.resets_leases, desk.leases["a"], desk.value) == ("duplicate", True, held, -1.0)


def test_reconnected_worker_gets_full_weights() -> None:
    desk = Desk(AgreementSettings(batch=10, outer=SGD, staleness=None, pull="int8"))
    desk.admit("a", "b")
    assert desk.push("a", 1.0)["a"][0].contents == "difference"
    desk.push("b", 1.0)
    desk.admit("a")
    assert [(told.contents, told.base) for told in desk.answers()["a"]] == [("weights", None)]


def test_work_of_a_lost_worker_goes_to_the_next_one() -> None:
    desk = Desk(ASYNC)
    desk.admit("a", "b")
    desk.dismiss("a")
    desk.push("b", 1.0)
    assert desk.leases["b"][0].samples == SampleRange(epoch=0, ranges=((0, 10),))


def test_slowest_waiting_worker_gets_work_first() -> None:
    desk = Desk(ASYNC, num_samples=40)
    desk.admit("a", "b", "c")
    for name in "aab":
        desk.push(name, 1.0)
    assert desk.leases["a"] == desk.leases["b"] == []
    desk.dismiss("c")
    assert set(desk.answers()) == {"b"}


def test_worker_waiting_for_a_lost_one_continues() -> None:
    desk = Desk(bounded(1))
    desk.admit("a", "b")
    desk.push("a", 1.0)
    assert desk.push("a", 1.0)["a"][0].lease is None
    desk.dismiss("b")
    assert desk.answers()["a"][0].lease is not None


@pytest.mark.parametrize("staleness", [1, 3])
def test_fast_worker_is_at_most_s_steps_ahead_of_the_slowest(staleness: int) -> None:
    desk = Desk(bounded(staleness))
    desk.admit("slow", "fast")
    turns = 0
    while desk.leases["fast"]:
        desk.push("fast", 1.0)
        turns += 1
    assert turns == staleness + 1
    answers = desk.push("slow", 1.0)
    assert answers["fast"][0].lease is not None
    assert answers["fast"][0].verdict is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=80))
def test_staleness_never_exceeds_its_bound(s: int, order: list[int]) -> None:
    desk, names = Desk(bounded(s)), "abc"
    desk.admit(*names)
    for k in order:
        if desk.leases[names[k]]:
            desk.push(names[k], 1.0)
    assert all(
        t.most_stale <= (len(names) - 1) * (2 * s + 1)
        for t in [worker.totals for worker in desk.server.workers.values()]
    )


def test_late_worker_does_not_block_the_others() -> None:
    desk = Desk(bounded(1))
    desk.admit("a", "b")
    for _ in range(5):
        desk.push("a", 1.0)
        desk.push("b", 1.0)
    desk.admit("c")
    assert desk.push("a", 1.0)["a"][0].lease is not None


def test_leases_never_exceed_the_requested_updates() -> None:
    desk = Desk(ASYNC, num_updates=2)
    desk.admit("a", "b", "c")
    assert [len(desk.leases[name]) for name in "ab"] == [1, 1]
    assert "c" not in desk.leases
    desk.dismiss("b")
    assert len(desk.leases["c"]) == 1
    desk.push("a", 1.0)
    answers = desk.push("c", 1.0)
    assert desk.server.is_over
    assert {name: told[0].is_last for name, told in answers.items()} == {"a": True, "c": True}


def test_end_is_announced_once_to_every_worker() -> None:
    desk = Desk(ASYNC, num_samples=20)
    desk.admit("a", "b")
    desk.push("a", 1.0)
    assert not desk.answers()["a"][0].is_last, "b may die yet"
    answers = desk.push("b", 1.0)
    assert {name: told[0].is_last for name, told in answers.items()} == {"a": True, "b": True}
    desk.dismiss("b")
    assert desk.answers() == {}


def test_overlapped_workers_hold_two_leases() -> None:
    agreement = AgreementSettings(batch=10, outer=SGD, staleness=None, contribution="delta", is_overlapped=True)
    desk = Desk(agreement)
    desk.admit("a")
    assert len(desk.leases["a"]) == 2
    desk.push("a", 1.0)
    assert len(desk.leases["a"]) == 2


def test_local_steps_follow_speed() -> None:
    agreement = AgreementSettings(batch=2, outer=SGD, staleness=None, contribution="delta", local_steps=4)
    desk = Desk(agreement, quorum=2)
    desk.admit("a", seconds=1.0)
    desk.admit("b", seconds=2.0)
    assert [(desk.leases[name][0].num_steps, desk.leases[name][0].num_samples) for name in "ab"] == [(4, 8), (2, 4)]
