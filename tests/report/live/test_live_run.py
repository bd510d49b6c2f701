"""What the page says of a run: who is slow, who is lost, what waiting costs, how long it will take yet."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest

from evener.records.event_tail import Moment, events_of
from evener.records.events import Phase, RunEvent, decode_events, encode_events
from evener.records.history import Entry, NodeWork
from evener.records.plan import Plan, Rejected
from evener.records.record import Event, Step
from evener.records.schema import MAX_AMOUNT, MAX_SECONDS
from evener.report.live.live_run import LiveRun
from evener.report.live.losses import Losses
from evener.report.live.picture import NodePicture
from evener.report.live.routes import MASTER
from evener.training.console import progress_words
from support.fake_runs import NODES, fake_plan, fake_run


def shown(events: Sequence[RunEvent]) -> LiveRun:
    """A run, every event of which is a moment."""
    run = LiveRun("run")
    for second, event in enumerate(events):
        run.take(Moment(float(second), [event]))
    return run


def node(run: LiveRun, name: str) -> NodePicture:
    return next(one for one in run.picture().nodes if one.name == name)


def slowed(step: Step, column: int, factor: float) -> Step:
    """`step` with one node computing so many times longer."""
    nodes = list(step.nodes)
    seconds = nodes[column].compute_seconds * factor
    longer = max(0.0, seconds - max(node.compute_seconds for node in nodes))
    nodes[column] = msgspec.structs.replace(nodes[column], compute_seconds=seconds)
    return msgspec.structs.replace(step, nodes=tuple(nodes), seconds=step.seconds + longer)


def test_healthy_run_has_no_red_node() -> None:
    record = fake_run(num_steps=200)
    run = shown([Phase(what="training", num_samples=40000, epochs=4), record.plan, *record.steps])
    picture = run.picture()
    assert {one.state for one in picture.nodes} == {""}
    assert picture.step == 200
    assert picture.progress == pytest.approx(0.5)
    assert picture.left_seconds == pytest.approx(200 * 0.075, rel=0.4)
    assert [one.share for one in picture.nodes] == pytest.approx([0.67, 0.28, 0.05])


def test_single_node_is_not_compared_with_an_ideal() -> None:
    alone, together = fake_run((100,), NODES[:1], num_steps=20), fake_run(num_steps=20)
    picture = shown([alone.plan, *alone.steps]).picture()
    assert picture.ideal is None
    assert shown([together.plan, *together.steps]).picture().ideal is not None


def test_node_at_half_its_usual_speed_is_reported_with_the_factor() -> None:
    record = fake_run(num_steps=60)
    steps = [*record.steps[:50], *(slowed(step, 1, 2.5) for step in record.steps[50:])]
    run = shown([record.plan, *steps])
    bob = node(run, "bob")
    assert bob.state == "slow"
    assert re.fullmatch(r"2\.[2-6] times slower than it was", bob.reason)
    assert bob.is_waited_for
    assert {one.state for one in run.picture().nodes if one.name != "bob"} == {""}


def test_node_with_less_work_is_not_slow() -> None:
    """The fixed part of a step weighs more then; the plan knows it."""
    few = fake_run(shares=(95, 3, 2), num_steps=30)
    many = fake_run(shares=(67, 28, 5), num_steps=60)
    run = shown([many.plan, *many.steps, *few.steps])
    assert node(run, "bob").state == ""


@pytest.mark.parametrize(
    ("kind", "state"), [("node lost", "lost"), ("excluded", "excluded"), ("away", "away"), ("expelled", "expelled")]
)
def test_events_set_the_state_of_a_node_until_it_returns(kind: str, state: str) -> None:
    record = fake_run(num_steps=20)
    event = Event(step=20, kind=kind, message="node bob: why", nodes=("bob",))
    run = shown([record.plan, *record.steps, event])
    assert (node(run, "bob").state, node(run, "bob").reason) == (state, "node bob: why")
    run.take(Moment(99.0, [Event(step=21, kind="back", message="node bob: is heard", nodes=("bob",))]))
    assert node(run, "bob").state == ""


def test_left_out_node_has_no_routes_until_it_takes_part() -> None:
    record = fake_run(num_steps=3)
    out = Rejected(what="old", reason="too slow", is_node=True)
    run = shown([msgspec.structs.replace(record.plan, rejected=(*record.plan.rejected, out)), *record.steps])
    assert (node(run, "old").state, node(run, "old").reason) == ("left out", "too slow")
    assert [one.name for one in run.picture().nodes] == [*(name for name, _, _ in NODES), "old"]
    assert "old" not in {route.source for route in run.picture().routes}
    nodes = (*NODES[:2], ("old", "cpu", 12e-3))
    run.take(Moment(9.0, [fake_plan(nodes=nodes)]))
    assert node(run, "old").state == ""
    assert {route.source for route in run.picture().routes} == {"ada", "bob", "old"}


def test_routes_bypass_a_lost_node() -> None:
    record = fake_run(num_steps=3)
    lost = Event(step=3, kind="node lost", message="node bob was killed", nodes=("bob",))
    routes = shown([record.plan, *record.steps, lost]).picture().routes
    assert [(one.source, one.target) for one in routes] == [("ada", "pi-in-the-attic"), ("pi-in-the-attic", "ada")]


def test_protocol_follows_the_options_and_then_the_record() -> None:
    record = fake_run(num_steps=3)
    run = shown([Phase(what="starting", options={"--agreement": "sync", "--batch-size": "9"}), record.plan])
    assert MASTER in {one.target for one in run.picture().routes}
    run.take(Moment(9.0, [record]))
    assert MASTER not in {one.target for one in run.picture().routes}


def test_nodes_working_as_ranks_have_no_master() -> None:
    told = Event(step=0, kind="as ranks", message="it has BatchNorm, so the nodes work together as ranks")
    run = shown([told, Phase(what="starting", options={"--agreement": "sync"}), fake_run(num_steps=3).plan])
    assert MASTER not in {one.target for one in run.picture().routes}


def test_task_file_and_start_time_are_shown() -> None:
    run = shown([Phase(what="starting", task="mine", file="mine.py")])
    run.take(Moment(70.0, [Phase(what="training")]))
    run.take(Moment(80.0, [fake_run(num_steps=3).plan]))
    picture = run.picture()
    assert (picture.task, picture.file, picture.began, picture.written) == ("mine", "mine.py", 70.0, 80.0)
    assert shown(events_of(fake_run(num_steps=3))).picture().task == "digits"


def test_lost_time_is_attributed_to_the_node_that_arrives_last() -> None:
    record = fake_run(num_steps=40)
    run = shown([record.plan, *(slowed(step, 2, 4.0) for step in record.steps)])
    picture = run.picture()
    assert picture.losses[0].node == "pi-in-the-attic"
    assert picture.losses[0].cause == "computing"
    assert "wait for pi-in-the-attic to compute" in picture.advice
    assert sum(loss.seconds for loss in picture.losses) <= sum(step.seconds for step in record.steps) * 5


def test_joining_node_gets_a_named_column() -> None:
    record = fake_run(num_steps=20)
    nodes = (("eve", "cpu", 1e-3), *(("ada", "cuda:0", 0.9e-3), ("bob", "cuda:0", 2.1e-3), ("x", "cpu", 12e-3)))
    wider = fake_run(shares=(60, 20, 10, 10), nodes=nodes, num_steps=3).steps
    joined = Event(step=20, kind="joined", message="eve came", nodes=("eve",))
    run = shown([record.plan, *record.steps, joined, *wider])
    assert run.history.names == ["ada", "bob", "pi-in-the-attic", "eve"]


def test_samples_shared_by_ranks_count_once() -> None:
    record = fake_run(num_steps=50)
    plan: Plan = msgspec.structs.replace(fake_plan(), strategy="filter")
    run = shown([Phase(what="training", num_samples=10000, epochs=1), plan, *record.steps])
    assert run.picture().progress == pytest.approx(0.5)


def test_run_with_only_a_record_is_over() -> None:
    record = fake_run(num_steps=50)
    picture = shown(events_of(record)).picture()
    assert picture.is_over
    assert picture.progress == 1.0
    assert picture.nodes[0].memory_bytes == record.nodes[0].peak_memory_bytes


def test_run_whose_leader_has_died_is_marked() -> None:
    run = shown([fake_plan()])
    run.abandon()
    assert (run.picture().phase, run.picture().detail) == ("failed", "the process that led the run is gone")


def test_busy_machine_appears_once_in_the_log() -> None:
    record = fake_run(num_steps=20)
    names = tuple(one.node for one in record.plan.assignments)
    busy = Event(step=0, kind="busy machine", message="other processes took 70% on all", nodes=names)
    run = shown([record.plan, busy, *record.steps])
    assert all("other processes" not in one.reason for one in run.picture().nodes)
    assert [event.kind for _, event in run.log if isinstance(event, Event)].count("busy machine") == 1
    assert set(run.history.names) == set(names)


@pytest.mark.parametrize(
    ("options", "is_advised"),
    [
        ({"--shares": "equal", "--agreement": ""}, True),
        ({"--shares": "measured", "--agreement": ""}, False),
        ({"--shares": "equal", "--agreement": "async"}, False),
        ({}, False),
    ],
)
def test_advice_for_measured_shares_appears_only_with_other_shares(options: dict[str, str], is_advised: bool) -> None:
    record = fake_run(num_steps=40)
    slow = [slowed(step, 2, 4.0) for step in record.steps]
    run = shown([Phase(what="starting", options=options), record.plan, *slow])
    assert ("--shares measured" in run.picture().advice) == is_advised
    over = shown(events_of(msgspec.structs.replace(record, steps=tuple(slow), options=options)))
    assert over.picture().advice == run.picture().advice


@pytest.mark.parametrize(
    ("cause", "options", "words"),
    [
        ("loading", {"--workers": "0"}, "--workers 2"),
        ("loading", {"--workers": "4"}, "--workers 8"),
        ("loading", {"workers": "8"}, "workers=16"),
        ("loading", {}, "DataLoader"),
        ("exchange", {"--batch-size": "224", "--agreement": ""}, "(now 224)"),
        ("exchange", {"--batch-size": "", "--agreement": ""}, "--agreement average"),
        ("exchange", {"--batch-size": "", "--agreement": "average"}, "--local-steps"),
        ("exchange", {"batch": "16"}, "batch= (now 16)"),
    ],
)
def test_advice_names_options_that_the_run_can_change(cause: str, options: dict[str, str], words: str) -> None:
    losses = Losses()
    seconds = 1.0 if cause == "loading" else 4.0
    nodes = {
        "ada": NodeWork(samples=1, io_seconds=0.9 if cause == "loading" else 0.1, compute_seconds=0.1),
        "bob": NodeWork(samples=1, io_seconds=0.1, compute_seconds=0.1),
    }
    losses.add(Entry(step=1, samples=2, seconds=seconds, steps=1, nodes=nodes))
    advice = losses.advice(options, divides_samples=True)
    assert words in advice
    assert ("--agreement average" in advice) == (cause == "exchange" and options.get("--agreement") == "")


@pytest.mark.parametrize(
    ("options", "is_advised"),
    [
        ({"--agreement": "diloco"}, True),
        ({"--agreement": "federated"}, False),
        ({"--agreement": "average", "--stationary": "True"}, False),
    ],
)
def test_local_steps_are_advised_only_where_they_can_be_chosen(options: dict[str, str], is_advised: bool) -> None:
    losses = Losses()
    nodes = {name: NodeWork(samples=1, io_seconds=0.1, compute_seconds=0.1) for name in ("ada", "bob")}
    losses.add(Entry(step=1, samples=2, seconds=4.0, steps=1, nodes=nodes))
    assert ("--local-steps" in losses.advice({"--batch-size": "8", **options}, divides_samples=True)) == is_advised


def test_node_shows_its_busy_cores_and_memory_during_a_run() -> None:
    record = fake_run(num_steps=30)
    steps = []
    for step in record.steps:
        first, *others = step.nodes
        loaded = msgspec.structs.replace(first, cpu_seconds=1.5 * step.seconds, memory_bytes=1000 + step.step)
        steps.append(msgspec.structs.replace(step, nodes=(loaded, *others)))
    run = shown([record.plan, *steps])
    ada, bob = node(run, "ada"), node(run, "bob")
    assert ada.cpu_cores == pytest.approx(1.5)
    assert (ada.memory_bytes, bob.cpu_cores) == (1030, 0.0)
    assert sum(work.cpu_seconds for work in run.history.totals.values()) > 0


IMPOSSIBLE = [("seconds", 1.7e308), ("seconds", -1.0), ("seconds", 5e-324), ("loss", 1e200), ("samples", -1)]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_step_of_impossible_values_is_refused(field: str, value: float) -> None:
    step = msgspec.to_builtins(fake_run(num_steps=1).steps[0])
    with pytest.raises(msgspec.ValidationError):
        decode_events(msgspec.json.encode([("Step", {**step, field: value})]))


def test_sum_of_the_longest_steps_can_be_decoded_and_shown() -> None:
    step = msgspec.structs.replace(fake_run(num_steps=1).steps[0], seconds=MAX_SECONDS, samples=MAX_AMOUNT, loss=1e100)
    names = ["ada", "bob", "pi"]
    total = Entry.of(step, names)
    total.add(Entry.of(step, names))
    events = decode_events(encode_events([Phase(what="training", num_samples=60_000, epochs=1), total.as_step(names)]))
    assert "left" in progress_words(shown(events).picture(), 80)
