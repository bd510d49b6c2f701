"""Runs on nodes of their own, side by side at one master; nodes that change from one to another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec.structs import replace

from evener.ps.master import checkpointing
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import RunEvents
from evener.records.errors import InvalidInput
from evener.records.events import decode_events
from evener.records.record import Epoch
from support.agreements import SYNC, distance
from support.linear_engine import job, serial, weights
from support.master_in_threads import Plane, plane, unpack, wait_until
from support.refusals import refused

pytestmark = pytest.mark.posix


def on(nodes: tuple[str, ...] | None, run: str, **words: Any) -> Job:
    return replace(job(SYNC, run=run, **words), nodes=nodes)


class Running:
    """A run that a command watches in a thread."""

    def __init__(self, ps: Plane, wanted: Job) -> None:
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(ps.watch(wanted, weights())))
        self._thread.start()
        wait_until(lambda: wanted.run in [run.run for run in ps.ask().runs], "that the run begins")

    def result(self) -> Any:
        self._thread.join()
        return unpack(self._results[0][0])


def version(ps: Plane, name: str) -> int:
    return next((run.version for run in ps.ask().runs if run.run == name), -1)


def assign(ps: Plane, run: str, *nodes: str) -> None:
    with ps.control() as control:
        control.assign(run, nodes)


def test_two_runs_side_by_side_each_equal_one_process() -> None:
    with plane("a", "b", "c") as ps:
        first = Running(ps, on(("a", "b"), "first", epochs=60))
        second = Running(ps, on(("c",), "second", epochs=50, seed=5))
        assert [(run.run, run.nodes) for run in ps.ask().runs] == [("first", ("a", "b")), ("second", ("c",))]
        (record, one), (other_record, other) = first.result(), second.result()
    assert distance(one, serial(60)) < 1e-12
    assert distance(other, serial(50, seed=5)) < 1e-12
    assert {node.name for node in record.nodes} <= {"a", "b"}
    assert [node.name for node in other_record.nodes] == ["c"]
    assert other_record.nodes[0].contributions == 250


@pytest.mark.parametrize("nodes", [None, ("b", "c")])
def test_run_on_a_busy_node_is_rejected_by_name(nodes: tuple[str, ...] | None) -> None:
    with plane("a", "b", "c") as ps:
        ps.nodes[1].mood.gate.clear()
        first = Running(ps, on(("a", "b"), "first"))
        with ps.control() as control, refused(InvalidInput):
            control.submit(on(nodes, "second"), weights(), [])
        ps.nodes[1].mood.gate.set()
        first.result()


def test_paused_run_resumes_on_other_nodes_where_it_stopped() -> None:
    with plane("a", "b") as ps:
        ps.nodes[0].mood.seconds = 0.02
        running = Running(ps, on(("a",), "moved", epochs=40))
        wait_until(lambda: version(ps, "moved") > 5)
        assign(ps, "moved")
        resting = version(ps, "moved")
        _, found = ps.run(on(("a",), "between"), weights())
        assert distance(found, serial(4)) < 1e-12
        assert version(ps, "moved") == resting
        assign(ps, "moved", "b")
        record, found = running.result()
    assert distance(found, serial(40)) < 1e-12
    assert [node.name for node in record.nodes] == ["a", "b"]
    assert sum(node.contributions for node in record.nodes) == 200


@pytest.mark.parametrize("leaves", [False, True])
def test_nodes_join_and_leave_a_run_in_progress(leaves: bool) -> None:
    with plane("a", "b") as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.01
        running = Running(ps, on(("a",), "shared", epochs=15))
        wait_until(lambda: version(ps, "shared") > 5)
        assign(ps, "shared", "a", "b")
        wait_until(lambda: [node.samples > 0 for node in ps.ask().nodes] == [True, True])
        if leaves:  # amid an update, which then is made without it
            assign(ps, "shared", "b")
        record, found = running.result()
    assert sum(step.samples for step in record.steps) == 15 * 60
    if not leaves:
        assert distance(found, serial(15)) < 1e-12


@pytest.mark.parametrize(
    ("run", "nodes", "reason"),
    [
        ("nothing", ("b",), "there is no run nothing in progress"),
        ("second", ("a",), "the master is busy with run first"),
        ("second", ("b", "a"), "the master is busy with run first"),
    ],
)
def test_nodes_of_another_run_cannot_be_assigned(run: str, nodes: tuple[str, ...], reason: str) -> None:
    with plane("a", "b") as ps:
        for node in ps.nodes:
            node.mood.gate.clear()
        both = [Running(ps, on(("a",), "first")), Running(ps, on(("b",), "second"))]
        with pytest.raises(InvalidInput, match=reason):
            assign(ps, run, *nodes)
        for node in ps.nodes:
            node.mood.gate.set()
        for running in both:
            assert distance(running.result()[1], serial(4)) < 1e-12


def test_nodes_of_a_run_without_a_node_list_cannot_be_assigned() -> None:
    with plane("a") as ps:
        ps.nodes[0].mood.gate.clear()
        running = Running(ps, on(None, "all"))
        with refused(InvalidInput):
            assign(ps, "all")
        ps.nodes[0].mood.gate.set()
        running.result()


def test_restarted_master_continues_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_MIN_INTERVAL_S", 0.02)
    with plane("a", "b", patience=5) as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.05
        both = [Running(ps, on(("a",), "first", epochs=20)), Running(ps, on(("b",), "second", epochs=20, seed=5))]
        wait_until(lambda: len(list(ps.home.run.glob("checkpoint-*"))) == 4)
        ps.stop_master()
        for node in ps.nodes:
            node.mood.seconds = 0.0
        ps.start_master()
        (record, one), (_, other) = both[0].result(), both[1].result()
    assert distance(one, serial(20)) < 1e-12
    assert distance(other, serial(20, seed=5)) < 1e-12
    assert [event.kind for event in record.events].count("master restarted") == 1


def test_error_in_one_run_does_not_affect_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.ps.master.lease_training import LeaseTraining

    tick = LeaseTraining.tick

    def broken(run: LeaseTraining, *words: Any) -> None:
        if run.job.run == "second" and run.server.version:
            raise ArithmeticError("the books do not balance")
        tick(run, *words)

    monkeypatch.setattr(LeaseTraining, "tick", broken)
    with plane("a", "b") as ps:
        first = Running(ps, on(("a",), "first", epochs=60))
        result, _ = ps.watch(on(("b",), "second", epochs=2000), weights())
        assert "run second cannot be continued (ArithmeticError: the books do not balance)" in result.reason
        assert distance(first.result()[1], serial(60)) < 1e-12


def test_late_watcher_receives_all_earlier_epochs() -> None:
    with plane("a") as ps:
        ps.nodes[0].mood.seconds = 0.01
        running = Running(ps, on(("a",), "watched", epochs=12))
        wait_until(lambda: version(ps, "watched") > 15)
        heard: list[Epoch] = []
        with ps.control() as control:
            control.follow(["watched"])
            while isinstance((frame := wait_until(lambda: control.news(1.0))).header, RunEvents):
                heard += [event for event in decode_events(frame.buffers[0]) if isinstance(event, Epoch)]
        record, _ = running.result()
    assert [epoch.epoch for epoch in heard] == list(range(12))
    assert tuple(epoch.validation for epoch in heard) == record.validations
