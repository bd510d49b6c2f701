"""Rounds: everybody of a round is waited for, nobody who is gone, and each contribution counts once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evener.agreements.layout import Flat
from evener.agreements.messages import Push, SampleRange, Update
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Sgd, Workload
from support.server_inboxes import LAYOUT, Desk

SGD = Sgd(learning_rate=1.0)
FIXED = AgreementSettings(batch=10, outer=SGD, division="fixed")
SPEED = AgreementSettings(batch=30, outer=SGD)
OVERLAPPED = AgreementSettings(batch=10, outer=SGD, division="fixed", contribution="delta", is_overlapped=True)


def trio(agreement: AgreementSettings = FIXED, **words: int) -> Desk:
    desk = Desk(agreement, quorum=3, **words)
    desk.admit("a", "b", "c")
    return desk


def test_weights_change_after_the_last_contribution_of_a_round() -> None:
    desk = trio()
    assert desk.push("a", 3.0) == {}
    assert desk.push("c", 6.0) == {}
    assert (desk.server.version, desk.value) == (0, 0.0)
    answers = desk.push("b", 9.0)
    assert (desk.server.version, desk.value, desk.server.weights.counters.tolist()) == (1, -6.0, [3])
    assert {name: [(a.verdict, a.version, a.contents) for a in told] for name, told in answers.items()} == {
        name: [("applied", 1, "weights")] for name in "abc"
    }
    assert [desk.weights_for(name) for name in "abc"] == [-6.0] * 3
    assert desk.last.updates == [
        Update(version=1, epoch=0, num_samples=30, loss=6.0, staleness={"a": 0, "b": 0, "c": 0})
    ]
    assert [lease.samples.ranges for name in "abc" for lease in desk.leases[name]] == [
        ((30, 10),),
        ((40, 10),),
        ((50, 10),),
    ]


def test_mean_is_weighted_by_samples() -> None:
    desk = Desk(SPEED, quorum=2)
    desk.admit("a", seconds=1.0)
    desk.admit("b", seconds=2.0)
    assert [desk.leases[name][0].num_samples for name in "ab"] == [20, 10]
    desk.push("a", 1.0)
    desk.push("b", 4.0)
    assert desk.value == -2.0


def test_worker_that_joins_mid_round_starts_with_the_next() -> None:
    desk = Desk(FIXED)
    desk.admit("a")
    desk.admit("b")
    assert desk.answers() == {}
    answers = desk.push("a", 1.0)
    assert [(a.verdict, a.resets_leases, a.contents) for a in answers["b"]] == [(None, True, "weights")]
    assert desk.push("a", 1.0) == {}
    assert set(desk.push("b", 1.0)) == {"a", "b"}


def test_open_leases_and_measured_speeds_are_known() -> None:
    desk = trio()
    desk.push("b", 1.0)
    awaited = {worker.name: list(worker.leases) for worker in desk.server.members}
    assert awaited == {"a": [1], "b": [], "c": [3]}
    assert desk.server.snapshot().state.unit_seconds == {"b": 1.0}


def test_lost_worker_is_dropped_and_its_samples_reassigned() -> None:
    desk = trio()
    lost = desk.leases["b"][0]
    desk.push("a", 1.0)
    desk.push("c", 3.0)
    desk.dismiss("b")
    assert (desk.server.version, desk.value) == (1, -2.0)
    desk.admit("b")
    assert desk.leases["a"][0].samples == lost.samples
    assert desk.server.workers["b"].totals.dismissed == 1


def test_contribution_of_a_worker_lost_later_counts() -> None:
    desk = trio()
    desk.push("a", 3.0)
    desk.dismiss("a")
    desk.push("b", 6.0)
    answers = desk.push("c", 9.0)
    assert desk.value == -6.0
    assert set(answers) == {"b", "c"}
    assert desk.server.workers["a"].totals.applied == 1


def test_round_without_workers_is_void() -> None:
    desk = trio()
    for name in "abc":
        desk.dismiss(name)
    assert (desk.server.version, desk.server.is_over) == (0, False)
    desk.admit("d", "e", "f")
    assert [desk.leases[name][0].samples for name in "def"] == [
        SampleRange(epoch=0, ranges=((k, 10),)) for k in (0, 10, 20)
    ]


def test_worker_with_a_non_finite_update_is_named_and_informed() -> None:
    desk = trio()
    desk.push("a", 3.0)
    desk.push("b", math.nan)
    answers = desk.push("c", 9.0)
    assert desk.value == -6.0
    (told,) = answers["b"]
    assert (told.verdict, told.contents, told.version) == ("refused", "weights", 1)
    assert "not finite" in told.reason
    assert told.lease is not None
    tally = desk.server.workers["b"].totals
    assert (tally.refused, tally.samples_refused, tally.applied) == (1, 10, 0)
    assert desk.last.updates[0].staleness.keys() == {"a", "c"}


def test_fully_rejected_round_changes_nothing_and_opens_the_next() -> None:
    desk = trio()
    for name in "abc":
        desk.push(name, math.inf)
    assert (desk.server.version, desk.value, desk.last.updates) == (0, 0.0, [])
    assert [desk.leases[name][0].samples.ranges for name in "abc"] == [((k, 10),) for k in (30, 40, 50)]


def test_contribution_of_the_wrong_size_is_rejected() -> None:
    desk = trio()
    lease = desk.leases["a"].pop(0)
    desk.heed(desk.server.push("a", Push(number=lease.number, seconds=1.0), LAYOUT.num_bytes - 1))
    desk.push("b", 2.0)
    answers = desk.push("c", 4.0)
    assert desk.value == -3.0
    assert answers["a"][0].reason == f"the contribution must have {LAYOUT.num_bytes} bytes, got {LAYOUT.num_bytes - 1}"


def test_repeated_contribution_counts_once() -> None:
    desk = trio()
    lease = desk.leases["a"][0]
    desk.push("a", 3.0)
    assert desk.push("a", 3.0, lease) == {}
    desk.push("b", 6.0)
    desk.push("c", 9.0)
    assert desk.value == -6.0
    (again,) = desk.push("a", 3.0, lease)["a"]
    assert (again.verdict, again.answers, again.resets_leases) == ("duplicate", lease.number, True)
    assert (again.contents, again.lease) == ("weights", desk.leases["a"][0])
    assert (desk.value, desk.server.workers["a"].totals.duplicate) == (-6.0, 2)


def test_contribution_to_a_revoked_lease_is_late() -> None:
    desk = trio()
    old = desk.leases["a"][0]
    desk.dismiss("a")
    (stranger,) = desk.push("a", 1.0, old)["a"]
    assert (stranger.verdict, stranger.lease, stranger.contents) == ("late", None, "nothing")
    assert "not a member of the run" in stranger.reason
    desk.push("b", 2.0)
    desk.admit("a")
    (told,) = desk.push("a", 1.0, old)["a"]
    assert (told.verdict, told.lease) == ("late", None)
    desk.push("c", 2.0)
    assert desk.value == -2.0
    assert desk.server.workers["a"].totals.late == 2


def test_repeated_contribution_of_a_returned_worker_is_a_duplicate() -> None:
    desk = trio()
    lease = desk.leases["a"][0]
    desk.push("a", 3.0)
    desk.dismiss("a")
    desk.admit("a")
    assert desk.push("a", 3.0, lease) == {}
    assert (desk.server.workers["a"].totals.duplicate, desk.server.workers["a"].totals.late) == (1, 0)


def test_returned_worker_gets_full_weights() -> None:
    desk = Desk(AgreementSettings(batch=10, outer=SGD, division="fixed", staleness=None, pull="int8"))
    desk.admit("a")
    desk.push("a", 1.0)
    assert desk.answers()["a"][0].contents == "difference"
    desk.dismiss("a")
    desk.admit("b")
    desk.push("b", 1.0)
    desk.admit("a")
    assert [(a.contents, a.base) for a in desk.answers()["a"]] == [("weights", None)]


def test_reconnected_worker_gets_its_leases_and_weights_again() -> None:
    desk = trio()
    before = list(desk.leases["b"])
    desk.admit("b")
    (told,) = desk.answers()["b"]
    assert (told.resets_leases, told.contents, desk.leases["b"]) == (True, "weights", before)


def test_rounds_need_a_quorum() -> None:
    desk = Desk(FIXED, quorum=2)
    desk.admit("a")
    assert desk.answers() == {}
    desk.admit("b")
    assert set(desk.answers()) == {"a", "b"}
    desk.push("a", 1.0)
    desk.dismiss("b")
    assert desk.answers()["a"][0].lease is None
    desk.admit("b")
    assert set(desk.answers()) == {"a", "b"}


def test_last_round_of_an_epoch_takes_the_rest_and_ends_for_all() -> None:
    desk = Desk(AgreementSettings(batch=60, outer=SGD), quorum=2)
    desk.admit("a", "b")
    desk.push("a", 1.0)
    desk.push("b", 1.0)
    assert sum(desk.leases[name][0].num_samples for name in "ab") == 40
    desk.push("a", 1.0)
    answers = desk.push("b", 1.0)
    assert desk.server.is_over
    assert [(a.is_last, a.lease, a.contents) for told in answers.values() for a in told] == [
        (True, None, "weights")
    ] * 2
    desk.admit("c")
    assert [a.is_last for a in desk.answers()["c"]] == [True]
    assert list(desk.answers()) == ["c"]


def test_run_ends_after_its_updates() -> None:
    desk = trio(num_updates=2)
    for _ in range(2):
        assert not desk.server.is_over
        for name in "abc":
            desk.push(name, 1.0)
    assert desk.server.is_over
    assert all(told[0].is_last for told in desk.answers().values())


def test_overlapped_rounds_never_exceed_the_requested_updates() -> None:
    desk = trio(OVERLAPPED, num_updates=3)
    given = {name: len(desk.leases[name]) for name in "abc"}
    for _ in range(3):
        for name in "abc":
            for answer in desk.push(name, 1.0).items():
                given[answer[0]] += sum(told.lease is not None for told in answer[1])
    assert (desk.server.is_over, given) == (True, {"a": 3, "b": 3, "c": 3})


def test_merged_bits_do_not_depend_on_arrival_order() -> None:
    results = []
    for order in ("abc", "cab", "bca"):
        desk = trio()
        for name in order:
            desk.push(name, {"a": 1.0, "b": 1e16, "c": 1.0}[name])
        results.append(desk.value)
    assert results[0] == results[1] == results[2]


def test_overlapped_workers_hold_two_leases_of_successive_rounds() -> None:
    desk = trio(OVERLAPPED)
    assert [len(desk.leases[name]) for name in "abc"] == [2, 2, 2]
    first = list(desk.leases["a"])
    desk.push("a", 1.0)
    assert desk.push("a", 2.0) == {}, "a round ahead of the others"
    desk.push("b", 1.0)
    answers = desk.push("c", 1.0)
    assert (desk.value, answers["a"][0].answers) == (-1.0, first[0].number)
    desk.push("b", 2.0)
    desk.push("c", 2.0)
    assert desk.value == -3.0
    assert desk.last.updates[0].staleness == {"a": 1, "b": 1, "c": 1}


def test_buffer_of_a_lost_worker_goes_to_the_next() -> None:
    desk = trio()
    addresses = []
    for name in "ab":
        inbox = desk.server.inbox(name, desk.leases[name][0].number)
        assert inbox is not None
        addresses.append(np.frombuffer(inbox, np.uint8).ctypes.data)
        del inbox
        desk.dismiss(name)
    assert addresses[0] == addresses[1]


def test_worker_without_a_name_is_rejected() -> None:
    server = ParameterServer(FIXED, Workload(num_samples=5, num_epochs=1), Flat(LAYOUT))
    with pytest.raises(ValueError, match="worker must be a name, got ''"):
        server.admit("")
