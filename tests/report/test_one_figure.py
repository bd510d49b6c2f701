"""A figure has one value: terminal, page, live page and pictures read it from the record."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evener.commands.demo import WAYS, verdict
from evener.records.event_tail import Moment
from evener.records.events import RunEvent
from evener.records.history import Entry, History, NodeWork, fraction_of_ideal
from evener.records.plan import Assignment, Plan
from evener.records.record import TrainRecord
from evener.report.bars import comparison_figure, phases_figure
from evener.report.html import write_page
from evener.report.live.live_run import LiveRun
from evener.report.measured import node_phases
from evener.report.tables import record_table
from evener.report.text import percent
from evener.training.partial_record import RunRequest, partial_record
from support.fake_runs import NODES, fake_plan, fake_run


def entry(number: int, seconds: float, **busy: tuple[int, float]) -> Entry:
    """A step in which every node computed so many samples in so many seconds, and waited for the rest."""
    nodes = {
        name: NodeWork(samples=samples, compute_seconds=took, wait_seconds=seconds - took)
        for name, (samples, took) in busy.items()
    }
    return Entry(step=number, samples=sum(n for n, _ in busy.values()), seconds=seconds, steps=1, nodes=nodes)


def test_ideal_is_the_combined_speed_of_nodes_that_never_wait() -> None:
    plan = fake_plan()
    assert fraction_of_ideal([entry(1, 2.0, a=(30, 1.0), b=(10, 1.0))], plan) == pytest.approx(20 / 40)
    uneven = [entry(1, 2.0, a=(30, 2.0), b=(10, 1.0))]
    assert fraction_of_ideal(uneven, plan) == pytest.approx((40 / 2) / (30 / 2 + 10 / 1))
    assert fraction_of_ideal([entry(1, 2.0, a=(30, 1.0))], plan) is None
    assert fraction_of_ideal([], plan) is None


def test_node_counts_in_the_ideal_while_it_takes_part() -> None:
    steps = [entry(1, 1.0, a=(10, 1.0), b=(10, 1.0)), entry(2, 2.0, a=(20, 2.0))]
    assert fraction_of_ideal(steps, fake_plan()) == pytest.approx(1.0)


def test_sharded_nodes_reach_the_busy_fraction_of_their_time() -> None:
    nodes = tuple(
        Assignment(rank=rank, node=name, device="cpu", samples=8, replica=0, share=0.5)
        for rank, name in enumerate("ab")
    )
    plan = Plan(strategy="filter", batch_size=8, assignments=nodes)
    assert fraction_of_ideal([entry(1, 2.0, a=(8, 1.0), b=(8, 2.0))], plan) == pytest.approx(0.75)


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 9)), min_size=2, max_size=4), min_size=1))
def test_no_run_exceeds_the_ideal(steps: list[list[tuple[int, float]]]) -> None:
    entries = [
        entry(number, max(took for _, took in works), **{f"n{i}": work for i, work in enumerate(works)})
        for number, works in enumerate(steps, 1)
    ]
    found = fraction_of_ideal(entries, fake_plan())
    assert found is None or 0 <= found <= 1


def told(record: TrainRecord) -> tuple[TrainRecord, LiveRun]:
    """A record of what `record` shows, made as a run's are, and the page that was shown the run."""
    live = LiveRun("run")
    events: list[RunEvent] = [record.plan, *record.steps]
    for number, event in enumerate(events):
        live.take(Moment(float(number), [event]))
    made = partial_record(live, record.plan, RunRequest("digits"), ending="", startup=1.0, seconds=record.seconds)
    live.take(Moment(1e6, [made]))
    return made, live


def test_every_view_shows_the_same_ideal_and_waiting(tmp_path: Path) -> None:
    record, live = told(fake_run(num_steps=300))
    assert record.of_ideal is not None
    of_ideal = percent(record.of_ideal)
    waits = [percent(node.waiting) for node in record.nodes]

    picture = live.picture()
    assert picture.ideal == record.of_ideal
    assert picture.samples_per_second == record.samples_per_second
    assert [node.waits for node in picture.nodes] == [node.waiting for node in record.nodes]
    assert [node.share for node in picture.nodes] == [node.share for node in record.nodes]

    terminal = io.StringIO()
    Console(width=200, file=terminal).print(record_table(record))
    text = terminal.getvalue()
    assert f"{of_ideal} of the ideal" in text
    assert all(wait in text for wait in waits)

    alone = msgspec.structs.replace(fake_run((20,), NODES[:1], num_steps=5), of_ideal=None, samples_per_second=1.0)
    write_page(tmp_path / "page.html", {"alone": alone, "evener": record}, "Runs")
    page = (tmp_path / "page.html").read_text()
    assert f"<dt>of the ideal</dt><dd>{of_ideal}</dd>" in page
    assert all(f">{wait}<" in page for wait in waits)

    (axes,) = comparison_figure({"alone": alone, "evener": record}).axes
    labels = [label.get_text() for label in axes.texts]
    assert any(label.endswith(f"{of_ideal} of the ideal)") for label in labels)
    (axes,) = phases_figure(record).axes
    drawn = [label.get_text() for label in axes.texts]
    shown = [percent(phases.waiting / phases.seconds) for phases in node_phases(record)]
    assert shown == waits
    assert all(wait in drawn for wait, node in zip(waits, record.nodes, strict=True) if node.waiting > 0.06)

    speeds = {name: [100.0] * (2 if name == "best node alone" else 1) for name in WAYS}
    assert of_ideal in verdict(speeds, [record.of_ideal], 0.0)


def test_history_writes_the_fraction_of_the_ideal() -> None:
    history = History()
    for name in ("a", "b"):
        history.add_node(name)
    history.add(entry(1, 2.0, a=(30, 2.0), b=(10, 1.0)))
    record, _ = told(fake_run(num_steps=5))
    own = history.record(
        record.nodes, plan=fake_plan(), task="t", seed=0, epochs=1, precision="fp32", seconds=2.0, startup_seconds=0.0
    )
    assert own.of_ideal == pytest.approx(0.8)
