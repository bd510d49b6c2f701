"""The conduct of a run without sockets: epochs end in order, whatever was refused, and whoever is lost."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from evener.agreements.settings import AgreementSettings, Sgd, asynchronous, average, synchronous
from evener.ps.master.lease_run import record_of
from evener.ps.master.nodes import MEASURING_S
from evener.ps.protocol.messages import Validate, Validated
from evener.records.errors import NonFiniteLoss, NoUsableNode
from evener.records.profile import DeviceProfile
from evener.records.record import Event
from evener.wire.errors import BadFrame
from support.run_stage import LAYOUT, Stage

SGD = Sgd(learning_rate=0.1)
ASYNC = asynchronous(batch=10, outer=SGD)
SYNC = synchronous(batch=20, outer=SGD)


def test_epoch_is_validated_after_all_earlier_epochs_have_ended() -> None:
    stage = Stage(ASYNC)
    for _ in range(3):  # the other half of the first epoch is still with b
        stage.push("a")
        stage.deliver()
    assert stage.run.used == {0: 10, 1: 20}
    assert stage.run.validation.due == []
    stage.push("b")
    assert [end.epoch for end in stage.run.validation.due] == [0, 1]
    assert {type(header) for header in stage.deliver()} == {Validate}


def test_epoch_holds_the_weights_that_it_ended_with() -> None:
    stage = Stage(SYNC)
    for name in "abab":
        stage.push(name)
        stage.deliver()
    first, second = stage.run.validation.due
    assert (first.version, second.version) == (1, 2)
    np.testing.assert_allclose(first.weights.floats[0], -0.1, rtol=1e-6)
    np.testing.assert_allclose(second.weights.floats[0], -0.2, rtol=1e-6)


@pytest.mark.parametrize("push", ["none", "int8", "top-k"])
def test_run_says_that_the_remainder_of_a_lost_node_is_lost(push: str) -> None:
    stage = Stage(replace(average(batch=10, local_steps=1), push=push))
    for name in "ab":
        stage.push(name)
    stage.deliver()
    stage.run.reassign(stage.nodes.by_name["a"])
    stage.run.reassign(stage.nodes.by_name["a"])  # it is lost already
    events = [event for event in stage.run.journal.events if isinstance(event, Event)]
    assert [event.nodes for event in events if event.kind == "remainder"] == [("a",)] * (push == "top-k")


def skipping(**changes: Any) -> AgreementSettings:
    return replace(average(batch=1, local_steps=5), skips_late=True, **changes)


def test_round_closes_without_a_late_node_whose_update_enters_the_next_one() -> None:
    stage = Stage(skipping(), epochs=2)  # rounds of 5 samples a node, 20 samples an epoch
    stage.now = 1.0
    stage.push("a", 1.0)
    for stage.now in (1.1, 1.9):  # half of the work is missing: it is awaited for as long again
        stage.run.tick(lambda _: False)
        assert stage.run.server.version == 0
    stage.now = 2.1
    stage.run.tick(lambda _: False)
    assert stage.run.server.version == 1
    np.testing.assert_allclose(stage.run.server.weights.floats[0], -1.0)
    events = [event for event in stage.run.journal.events if isinstance(event, Event)]
    assert [(event.kind, event.nodes) for event in events] == [("skipped", ("b",))]
    stage.deliver()
    assert [len(stage.leases[name]) for name in "ab"] == [1, 1]
    stage.push("b", 3.0)
    assert stage.run.server.version == 1
    stage.push("a", 1.0)
    np.testing.assert_allclose(stage.run.server.weights.floats[0], -1.0 - (1.0 + 3.0) / 2)
    stage.deliver()
    assert [len(stage.leases[name]) for name in "ab"] == [1, 1]
    totals = stage.run.server.workers["b"].totals
    assert (totals.applied, totals.staleness, totals.late) == (1, 1, 0)
    assert stage.run.used == {0: 15}


def work_alone(stage: Stage, rounds: int) -> None:
    """Let a contribute to so many rounds while b is late."""
    for _ in range(rounds):
        stage.now += 1.0
        stage.push("a")
        stage.now += 2.1
        stage.run.tick(lambda _: False)
        stage.deliver()


def test_samples_of_late_nodes_count_in_their_own_epoch() -> None:
    stage = Stage(skipping(), epochs=3)
    work_alone(stage, rounds=5)
    assert stage.run.used == {0: 15, 1: 10}
    assert stage.run.validation.due == []
    stage.push("b")
    stage.push("a")
    assert [end.epoch for end in stage.run.validation.due] == [0]


def test_late_update_after_all_rounds_counts_by_its_part_of_its_own() -> None:
    stage = Stage(replace(average(batch=10), skips_late=True), epochs=1)  # one round
    stage.now = 1.0
    stage.push("a", 1.0)
    stage.now = 2.1
    stage.run.tick(lambda _: False)
    np.testing.assert_allclose(stage.run.server.weights.floats[0], -1.0)
    stage.push("b", 3.0)
    np.testing.assert_allclose(stage.run.server.weights.floats[0], -1.0 - 0.5 * 3.0)
    assert stage.run.server.is_over
    assert stage.run.used == {}


def test_epochs_of_the_record_do_not_go_back_with_a_late_update() -> None:
    stage = Stage(skipping(), epochs=3)
    work_alone(stage, rounds=11)  # all samples but those of b, which are of the first epoch
    assert stage.leases["a"] == []
    assert stage.run.journal.history.epoch == 2
    stage.push("b")
    assert stage.run.server.is_over
    assert stage.run.journal.history.epoch == 2


def test_late_node_that_hangs_is_found_although_others_are_never_idle() -> None:
    stage = Stage(skipping(), epochs=50)
    named: list[str] = []
    for _ in range(60):
        stage.now += 1.0
        if stage.leases["a"]:
            stage.push("a")
        stage.run.tick(lambda _: False)
        stage.deliver()
        named += [node.name for what, node in stage.run.observations if what == "late"]
        stage.run.observations.clear()
    assert set(named) == {"b"}


@pytest.mark.parametrize("agreement", [skipping(), average(batch=1, local_steps=5)])
def test_node_that_is_lost_after_it_was_late_is_replaced(agreement: AgreementSettings) -> None:
    stage = Stage(agreement, epochs=1)
    stage.now = 1.0
    stage.push("a")
    stage.now = 3.0
    stage.run.tick(lambda _: False)
    stage.deliver()
    stage.run.reassign(stage.nodes.by_name["b"])
    for _ in range(3):
        stage.deliver()
        stage.push("a")
    assert stage.run.server.is_over
    assert stage.run.used == {}


def answer_slices(stage: Stage, headers: list[Any]) -> None:
    """Let b answer the slices that are sent to it."""
    for part in [part for header in headers if isinstance(header, Validate) for part in header.slices]:
        answer = Validated(run="r", number=part.number, loss=1.0, correct=1.0)
        with contextlib.suppress(BadFrame):  # a slice of a
            stage.run.validated(stage.nodes.by_name["b"], answer)


@pytest.mark.parametrize("agreement", [SYNC, ASYNC])
def test_validation_does_not_wait_for_a_node_that_never_answers(agreement: AgreementSettings) -> None:
    stage = Stage(agreement, epochs=200)
    for _ in range(200):
        for name in "ab":
            if stage.leases[name]:
                stage.push(name)
                answer_slices(stage, stage.deliver())
        assert len(stage.run.validation.due) <= 4
    assert len(stage.run.journal.history.validations) > 90


@pytest.mark.parametrize("agreement", [SYNC, ASYNC])
def test_work_waits_while_many_validations_are_due(agreement: AgreementSettings) -> None:
    stage = Stage(agreement, epochs=50)
    for _ in range(200):
        for name in "ab":
            if stage.leases[name]:
                stage.push(name)
        stage.deliver()
        stage.run.tick(lambda _: False)
    assert stage.leases == {"a": [], "b": []}
    assert 4 < len(stage.run.validation.due) < 8
    version = stage.run.server.version
    stage.now += 100.0  # nothing moves: each slice is sent to the other node
    stage.run.tick(lambda _: False)
    answer_slices(stage, stage.deliver())
    while not stage.leases["b"]:
        answer_slices(stage, stage.deliver())
        stage.now += 100.0
        stage.run.tick(lambda _: False)
    assert stage.run.server.version == version
    stage.push("b")


def test_nodes_begin_work_as_far_as_memory_allows() -> None:
    room = [float(LAYOUT.num_bytes - 1)]
    stage = Stage(SYNC, room=lambda: room[0])
    assert [len(stage.leases[name]) for name in "ab"] == [1, 0]
    assert stage.run.held_bytes == 2 * LAYOUT.num_bytes
    for _ in range(3):
        stage.run.tick(lambda _: False)
        stage.push("a")
        stage.deliver()
    assert [event.kind for event in stage.run.journal.history.events] == ["left out"]
    assert stage.run.server.version == 3
    stage.run.tick(lambda _: False)
    room[0] = LAYOUT.num_bytes
    stage.run.tick(lambda _: False)
    stage.push("a")
    stage.deliver()
    assert [len(stage.leases[name]) for name in "ab"] == [1, 1]
    assert stage.run.server.version == 4


def test_node_without_room_begins_when_the_others_have_left() -> None:
    stage = Stage(ASYNC, room=lambda: 0.0)
    stage.run.reassign(stage.nodes.by_name["a"])
    stage.run.tick(lambda _: False)
    stage.deliver()
    assert len(stage.leases["b"]) == 1


def test_node_without_room_takes_over_when_the_others_have_left() -> None:
    """The run looks for nodes that can take part before it looks for room."""
    stage = Stage(ASYNC, room=lambda: 0.0)
    stage.run.reassign(stage.nodes.by_name["a"])
    stage.run.begin([stage.nodes.by_name["b"]])
    stage.deliver()
    assert stage.run.failure is None
    assert len(stage.leases["b"]) == 1


def test_node_without_room_waits_while_others_work() -> None:
    stage = Stage(ASYNC, room=lambda: 0.0)
    stage.run.begin([stage.nodes.by_name["b"]])
    stage.deliver()
    assert stage.run.failure is None
    assert stage.leases["b"] == []


def test_run_ends_before_it_begins_if_some_nodes_cannot_and_others_measure_for_too_long() -> None:
    stage = Stage(ASYNC)
    node, other = stage.nodes.record("c"), stage.nodes.record("d")
    node.joined_at = stage.now
    other.profile = DeviceProfile(node="d", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
    other.left_out_of.add(stage.run.job.run)
    stage.now += MEASURING_S + 1.0
    stage.run.begin([node])
    assert stage.run.failure is None  # nodes have worked for it, and may come back
    stage.run.has_assigned_work = False
    stage.now -= 1.0
    stage.run.begin([node, other])
    assert stage.run.failure is None
    stage.now += 1.0
    stage.run.begin([node])
    assert stage.run.failure is None  # as if no node was there
    stage.run.begin([node, other])
    assert isinstance(stage.run.failure, NoUsableNode)


def test_peak_memory_of_a_node_outlives_its_process() -> None:
    stage = Stage(SYNC)
    node = stage.nodes.by_name["a"]
    node.peak_memory_bytes = 2**30
    for name in "ab":
        stage.push(name)
    node.peak_memory_bytes = 0  # another process of that name has joined
    history = stage.run.journal.history
    record = record_of(stage.run.job, history, {"a": node}, {}, {}, seconds=1.0, startup=0.0, environment={})
    assert [one.peak_memory_bytes for one in record.nodes] == [2**30, 0]


def test_memory_of_departed_nodes_is_free() -> None:
    stage = Stage(ASYNC)
    before = stage.run.held_bytes
    for _ in range(3):
        for name in "ab":
            stage.push(name)
            stage.deliver()
    assert len(stage.run.server._buffers._pool._buffers) > 0
    stage.run.reassign(stage.nodes.by_name["a"])
    assert stage.run.server._buffers._pool._buffers == []
    assert stage.run.held_bytes < before + 5 * LAYOUT.num_bytes


def test_epochs_that_end_together_share_a_copy_of_the_weights() -> None:
    stage = Stage(ASYNC)
    for _ in range(5):  # the other half of the first epoch is still with b
        stage.push("a")
        stage.deliver()
    stage.push("b")
    first, *others = stage.run.validation.due
    assert len(others) == 2
    assert all(other.weights is first.weights for other in others)


def test_rejected_update_of_a_lost_node_still_ends_its_epoch() -> None:
    stage = Stage(SYNC)
    stage.push("a", float("nan"))
    stage.run.reassign(stage.nodes.by_name["a"])
    stage.deliver()
    stage.push("b")
    stage.deliver()
    assert stage.run.server.workers["a"].totals.refused == 1
    assert [event.kind for event in stage.run.journal.history.events] == ["refused"]
    assert [end.epoch for end in stage.run.validation.due] == [0]


@pytest.mark.parametrize("agreement", [SYNC, ASYNC])
def test_run_that_ends_before_any_update_fails(agreement: AgreementSettings) -> None:
    stage = Stage(agreement, epochs=1)
    for name in "ab":
        assert stage.run.failure is None
        stage.push(name, float("nan"))
        stage.deliver()
    assert stage.run.server.is_over
    assert type(stage.run.failure) is NonFiniteLoss


def test_run_that_ends_after_an_update_succeeds() -> None:
    stage = Stage(ASYNC, epochs=1)
    stage.push("a", float("nan"))
    stage.push("b")
    stage.deliver()
    assert stage.run.server.is_over
    assert stage.run.failure is None


@pytest.mark.parametrize("is_cut", [False, True])
def test_membership_counts_updates_of_connected_nodes_only(is_cut: bool) -> None:
    stage = Stage(SYNC)
    stage.push("a")
    if is_cut:
        stage.nodes.disconnect(0)
    stage.push("b")
    assert [(what, node.name) for what, node in stage.run.observations] == [
        ("contributed", name) for name in ("b" if is_cut else "ab")
    ]


@pytest.mark.parametrize(("others", "limit"), [(0.5, 15 + 10 + 2), (60.0, 15 + 10 + 240)])
def test_slow_link_is_dropped_with_advice_after_a_long_wait(others: float, limit: float) -> None:
    stage = Stage(SYNC)  # ten samples of a second each, a patience of 15 s
    stage.now = others
    stage.push("a")
    stage.run.observations.clear()
    for stage.now in (others + 1, limit - 0.1):
        stage.run.tick(lambda peer: peer == 1)
        assert not stage.run.observations
    stage.now = limit + 0.1
    stage.run.tick(lambda peer: peer == 1)
    assert [(what, node.name) for what, node in stage.run.observations] == [("late", "b")]
    (event,) = stage.run.journal.history.events
    assert (event.kind, event.nodes) == ("slow link", ("b",))
    for part in (f" {limit:.0f} s ", f" {others:.1f} s", "--local-steps", "--compress"):
        assert part in event.message


def test_slow_link_is_compressed_before_its_node_is_dropped() -> None:
    stage = Stage(replace(SYNC, slow_link="bf16"))
    stage.now = 0.5
    stage.push("a")
    stage.run.observations.clear()
    limit = 15 + 10 + 2  # patience, work, four times what the other one needed
    for stage.now in (limit + 0.1, 2 * limit - 1):
        stage.run.tick(lambda peer: peer == 1)
        assert not stage.run.observations
    (told,) = stage.run.journal.history.events
    assert (told.kind, told.nodes) == ("slow link", ("b",))
    assert re.search(r"node b took 27 s for what others did in 0.5 s; it sends bf16 from now on", told.message)
    assert list(stage.run.speeds.validators) == ["a"], "whole weights do not go over that line any more"
    stage.now = 2 * limit + 1
    stage.run.tick(lambda peer: peer == 1)
    assert [(what, node.name) for what, node in stage.run.observations] == [("late", "b")]


def test_link_is_not_checked_once_all_nodes_work() -> None:
    stage = Stage(SYNC)
    stage.now = 10_000.0
    stage.run.tick(lambda peer: True)
    assert not stage.run.observations


@pytest.mark.parametrize("agreement", [SYNC, ASYNC])
def test_node_that_leaves_finishes_its_lease_and_gets_no_other(agreement: AgreementSettings) -> None:
    stage = Stage(agreement, epochs=3)
    one = stage.nodes.by_name["a"]
    one.leaving_until = 10.0
    stage.run.retire(one)
    assert not stage.run.is_free(one)
    stage.push("a")
    while not stage.run.server.is_over:
        answer_slices(stage, stage.deliver())
        assert stage.leases["a"] == []
        assert stage.run.is_free(one)
        stage.push("b")
    work = stage.run.journal.history.totals
    assert work["a"].samples == 10
    assert work["b"].samples == 50


def test_no_work_begins_while_all_nodes_leave() -> None:
    stage = Stage(SYNC)
    for name in "ab":
        stage.run.retire(stage.nodes.by_name[name])
        stage.push(name)
    stage.deliver()
    assert stage.leases == {"a": [], "b": []}
    stage.run.reassign(stage.nodes.by_name["b"])
    stage.run.admit(stage.nodes.by_name["b"])  # it is back
    stage.deliver()
    assert len(stage.leases["b"]) == 1


def test_only_the_first_reason_of_a_node_that_cannot_take_part_is_recorded() -> None:
    stage = Stage(SYNC)
    for _ in range(3):
        stage.run.not_ready(stage.nodes.by_name["a"], "its disk is full")
    assert [event.kind for event in stage.run.journal.history.events].count("left out") == 1


def break_connection(stage: Stage, name: str) -> None:
    """Pass a node over whose connection broke, and let it reconnect, as the scheduler does."""
    node = stage.nodes.by_name[name]
    stage.run.reassign(node)
    stage.leases[name].clear()
    if node.can_work or not stage.run.is_free(node):
        stage.run.admit(node)


@pytest.mark.parametrize("agreement", [SYNC, ASYNC])
def test_leaving_node_that_reconnects_gets_no_lease(agreement: AgreementSettings) -> None:
    stage = Stage(agreement)
    one, other = stage.nodes.by_name["a"], stage.nodes.by_name["b"]
    stage.run.reassign(other)
    stage.nodes.decide("disconnected", other, 1.0)
    stage.deliver()
    while not stage.run.validation.has_slices(one):
        stage.push("a")
        stage.deliver()
    one.leaving_until = 100.0
    stage.run.retire(one)
    break_connection(stage, "a")
    assert {type(header) for header in stage.deliver()} == {Validate}
    assert stage.leases["a"] == []
    assert stage.run.server.staying == []


def test_leaving_node_keeps_its_slices_when_another_joins() -> None:
    stage = Stage(SYNC)
    for name in "ab":
        stage.push(name)
    stage.deliver()
    one = stage.nodes.by_name["a"]
    one.leaving_until = 100.0
    stage.run.retire(one)
    third = stage.nodes.record("c")
    stage.nodes.decide("joined", third, 0.0, incarnation=1)
    stage.nodes.connect(third, 2)
    stage.sent.clear()
    stage.run.ready(third, 1.0)
    assert not [header for _, header in stage.sent if isinstance(header, Validate)]
    assert stage.run.validation.has_slices(one)
    assert stage.run.validation.pending[0].check is not None
