"""Master and nodes together: whatever the agreement, and whoever comes, goes or misbehaves, the run goes on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from evener.agreements.messages import Push
from evener.ps.protocol.messages import PROTOCOL_VERSION, Contribution, Dismiss, Header
from evener.records.errors import Interrupted, InvalidInput, NonFiniteLoss, NoUsableNode
from evener.wire.errors import ConnectionLost
from support.agreements import SYNC, WAYS, distance
from support.linear_engine import BATCH, SAMPLES, TRUTH, Mood, job, serial, weights
from support.master_in_threads import plane, unpack, wait_until
from support.refusals import refused
from support.strangers import introduction, next_told, play, stranger


def test_synchronous_training_on_three_nodes_equals_one_process() -> None:
    with plane("a", "b", "c") as ps:
        record, found = ps.run(job(SYNC, epochs=3), weights())
    assert distance(found, serial(3)) < 1e-12
    assert [step.samples for step in record.steps] == [BATCH] * 15
    assert sum(node.share for node in record.nodes) == pytest.approx(1)
    assert sum(node.contributions for node in record.nodes) >= 15


@pytest.mark.parametrize("way", WAYS)
def test_every_protocol_converges_and_uses_each_sample_once_per_epoch(way: str) -> None:
    with plane("a", "b") as ps:
        record, found = ps.run(job(WAYS[way], epochs=80, name=way), weights())
    assert float(np.abs(found["w"] - TRUTH).max()) < 0.2
    assert sum(step.samples for step in record.steps) == 80 * SAMPLES
    assert [v.epoch for v in record.validations] == list(range(80))
    assert record.validation_accuracy is not None
    assert record.validation_accuracy > 0.9
    assert record.agreement == way
    assert (record.bytes_saved > 0) == (way == "int8")


def test_staleness_is_recorded() -> None:
    with plane() as ps:
        ps.join("slow", Mood(seconds=0.01))
        ps.join("fast")
        record, _ = ps.run(job(WAYS["bounded"], epochs=8, name="bounded"), weights())
    assert max(node.most_stale for node in record.nodes) >= 1
    assert any(step.staleness > 0 for step in record.steps)


def test_all_ready_nodes_contribute_to_the_first_round() -> None:
    with plane("a", "b", "c") as ps:
        record, _ = ps.run(job(WAYS["average"], epochs=1, name="average"), weights())
    assert [node.contributions for node in record.nodes] == [1, 1, 1]


def test_node_that_joins_during_a_run_contributes() -> None:
    with plane() as ps:
        ps.join("first", Mood(seconds=0.005))
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=12), weights())))
        running.start()
        wait_until(lambda: ps.version() > 3)
        ps.join("second")
        running.join()
    (result, words), *_ = results
    record, found = unpack(result)
    assert distance(found, serial(12)) < 1e-12
    assert [node.name for node in record.nodes] == ["first", "second"]
    assert record.nodes[1].share > 0.1
    assert [len(word.assignments) for word in words if type(word).__name__ == "Plan"] == [1, 2]


def test_cut_connections_are_restored_without_losing_samples() -> None:
    with plane("a", "b", "c", patience=20) as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.004
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=20), weights())))
        running.start()
        for turn in range(1, 10):
            wait_until(lambda turn=turn: ps.version() > 8 * turn or not running.is_alive())  # type: ignore[misc]
            ps.nodes[turn % 3].cut()
        running.join()
    record, _ = unpack(results[0][0])
    assert sum(event.kind == "away" for event in record.events) >= 5
    assert sum(event.kind == "back" for event in record.events) >= 5
    assert sum(step.samples for step in record.steps) == 20 * SAMPLES


def test_update_with_nan_is_rejected_counted_and_named() -> None:
    with plane("a") as ps:
        ps.join("b", Mood(nan_calls=(2, 4)))
        record, found = ps.run(job(SYNC, epochs=60), weights())
    b = next(node for node in record.nodes if node.name == "b")
    assert b.refused == 2
    refusals = [event.message for event in record.events if event.kind == "refused"]
    assert len(refusals) == 2
    assert all("the update of node b was refused" in message and "finite" in message for message in refusals)
    assert len(record.validations) == 60  # refused samples count as used: every epoch ends
    assert float(np.abs(found["w"] - TRUTH).max()) < 0.2


def test_node_with_only_nan_updates_is_excluded() -> None:
    with plane("good", patience=3) as ps:
        ps.join("bad", Mood(always_nan=True))
        record, _ = ps.run(job(SYNC, epochs=10), weights())
    excluded = [event.message for event in record.events if event.kind == "excluded"]
    assert excluded
    assert "node bad: its update was refused, the 3rd lapse" in excluded[0]
    assert record.validation_accuracy is not None


def test_divergence_on_all_nodes_ends_the_run() -> None:
    with plane() as ps:
        for name in ("a", "b"):
            ps.join(name, Mood(always_nan=True))
        result, _ = ps.watch(job(SYNC), weights())
    assert isinstance(result.error, NonFiniteLoss)
    assert "every update of every node is refused" in result.reason


def test_node_that_cannot_train_is_left_out_with_its_reason() -> None:
    with plane("a") as ps:
        ps.join("b", Mood(refuses="there are no data here"))
        ps.join("c", Mood(fails_at=3))
        record, _ = ps.run(job(SYNC, epochs=4), weights())
    left_out = [event.message for event in record.events if event.kind == "left out"]
    assert "node b cannot take part: there are no data here" in left_out
    failed = "node c cannot take part: ZeroDivisionError: the task divides by nothing"
    assert any(message.startswith(failed) for message in left_out)
    assert sum(step.samples for step in record.steps) == 4 * SAMPLES


def test_run_without_usable_nodes_fails_with_their_reasons() -> None:
    with plane() as ps:
        ps.join("a", Mood(refuses="there are no data here"))
        result, _ = ps.watch(job(SYNC), weights())
    assert isinstance(result.error, NoUsableNode)
    assert "no node can take part in the run: node a cannot take part: there are no data here" in result.reason
    assert result.record == b""


def test_frozen_node_is_excluded_and_its_work_reassigned() -> None:
    with plane("a", "b", patience=0.6) as ps:
        still = ps.join("still")
        results: list[Any] = []
        for node in ps.nodes:
            node.mood.seconds = 0.01
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=40), weights())))
        running.start()
        wait_until(lambda: ps.version() > 5)
        still.mood.gate.clear()  # it beats all the same
        wait_until(lambda: any("exclude node still" in sentence for sentence in ps.said))
        still.mood.gate.set()
        running.join()
    record, _ = unpack(results[0][0])
    assert sum(step.samples for step in record.steps) == 40 * SAMPLES
    assert any("node still: it is heard, but its update did not come in time" in e.message for e in record.events)
    waits = [step.seconds for step in record.steps]
    assert max(waits) < 3 * 0.6
    assert next(node.late for node in record.nodes if node.name == "still") >= 1


def test_local_steps_longer_than_the_patience_are_awaited() -> None:
    with plane("fast", patience=0.5) as ps:
        ps.join("slow", Mood(step_seconds=0.3))  # three steps of an epoch's five, if it is taken to be as fast
        record, _ = ps.run(job(WAYS["average"], epochs=2, name="average"), weights())
    assert not [event.message for event in record.events if event.kind in ("excluded", "skipped")]
    assert max(step.seconds for step in record.steps) > 0.6
    assert record.nodes[1].contributions >= 1


def test_slow_step_is_awaited_once_its_duration_is_known() -> None:
    with plane("fast", patience=0.5) as ps:
        ps.nodes[0].mood.seconds = 0.1
        ps.join("slow", Mood(seconds=1.2, unit_seconds=1 / 12))  # of six: with the patience not enough
        record, _ = ps.run(job(replace(SYNC, division="fixed"), epochs=2), weights())
    assert [event.kind for event in record.events].count("excluded") == 1
    assert record.nodes[1].contributions >= 2
    assert sum(step.samples for step in record.steps) == 2 * SAMPLES


def test_ctrl_c_ends_the_run_with_its_current_results() -> None:
    with plane() as ps:
        ps.join("a", Mood(seconds=0.01))
        submitted = job(SYNC, epochs=1000)
        with ps.control() as control:
            control.submit(submitted, weights(), [])
            wait_until(lambda: ps.version() > 3)
            control._send_stop(submitted.run)
            result = control.watch(submitted.run, lambda _: None, lambda: None)
        record, _ = unpack(result)
        assert isinstance(result.error, Interrupted)
        assert "as asked" in result.reason
        assert record.steps[-1].step > 3
        assert ps.ask().run is None
        ps.run(job(SYNC, run="linear-2"), weights())  # the nodes are free again


def test_master_rejects_second_run_for_the_same_nodes() -> None:
    with plane() as ps:
        ps.join("a", Mood(seconds=0.01))
        with ps.control() as first, ps.control() as second:
            first.submit(job(SYNC, epochs=1000), weights(), [])
            wait_until(lambda: ps.version() > 0)
            with refused(InvalidInput):
                second.submit(job(SYNC, run="linear-2"), weights(), [])


def test_run_finishes_after_its_command_has_gone() -> None:
    with plane() as ps:
        ps.join("a", Mood(seconds=0.002))
        with ps.control() as control:
            control.submit(job(SYNC, epochs=6), weights(), [])
        wait_until(lambda: (ps.home.runs / "linear-1" / "end.json").exists())
        with ps.control() as control:
            control._connection.send(watch("linear-1"))
            record, found = unpack(control.watch("linear-1", lambda _: None, lambda: None))
    assert distance(found, serial(6)) < 1e-12
    assert record.steps[-1].step == 30


def test_restarted_master_reconnects_its_nodes_and_continues() -> None:
    with plane("a", "b", patience=5) as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.004
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=30), weights())))
        running.start()
        for turn in range(1, 4):
            wait_until(lambda turn=turn: ps.version() > 30 * turn)  # type: ignore[misc]
            ps.stop_master()
            ps.start_master()
        running.join()
        assert all(node.mood.made == 1 for node in ps.nodes)  # model and data stayed where they were
    result, words = results[0]
    record, found = unpack(result)
    assert distance(found, serial(30)) < 1e-12
    assert [event.kind for event in record.events].count("master restarted") == 3
    assert [v.epoch for v in record.validations] == list(range(30))
    assert any(getattr(word, "kind", "") == "master lost" for word in words)
    assert record.steps[-1].step == 150


def test_status_lists_nodes_and_the_current_run() -> None:
    with plane("a") as ps:
        ps.join("b", Mood(seconds=0.01))
        with ps.control() as control:
            control.submit(job(SYNC, epochs=1000), weights(), [])
            wait_until(lambda: ps.version() > 20)
        situation = ps.ask()
    assert [node.name for node in situation.nodes] == ["a", "b"]
    assert {node.state for node in situation.nodes} == {"present"}
    assert all(node.samples > 0 and node.bytes_sent > 0 and node.bytes_received > 0 for node in situation.nodes)
    assert {node.doing for node in situation.nodes} == {"works"}
    assert (situation.run.run, situation.run.method, situation.run.epochs) == ("linear-1", "sync", 1000)


def test_second_node_of_the_same_name_replaces_the_first() -> None:
    with plane("a") as ps:
        first = ps.nodes[0]
        wait_until(lambda: ps.ask().nodes)
        ps.join("a")
        first.thread.join(10)
        assert "a later process of that name has taken its place" in str(first.error)
        assert not ps.nodes[1].error


def test_master_dismisses_node_of_another_protocol() -> None:
    with plane() as ps, stranger(ps) as connection:
        connection.send(introduction("old", protocol=PROTOCOL_VERSION + 1))
        frame = connection.receive()
        assert isinstance(frame.header, Dismiss)
        assert "install the same version on both" in frame.header.reason


def test_message_before_joining_closes_the_connection() -> None:
    with plane() as ps, stranger(ps) as connection:
        connection.send(Contribution(run="linear-1", push=Push(number=1, seconds=1.0)), [bytes(8)])
        with refused(ConnectionLost):
            next_told(connection)


def test_update_of_the_wrong_size_is_rejected() -> None:
    with plane(patience=1) as ps, stranger(ps) as connection:
        connection.send(introduction("odd", profiled=True))
        with ps.control() as control:
            control.submit(job(SYNC, epochs=1), weights(), [])
            lease = play(connection)
            connection.send(Contribution(run="linear-1", push=Push(number=lease.number, seconds=1.0)), [bytes(8)])
            told = next_told(connection)
        assert told.answer.verdict == "refused"
        assert "must have 48 bytes, got 8" in told.answer.reason


def watch(run: str) -> Header:
    from evener.ps.protocol.messages import WatchRun

    return WatchRun(run=run)
