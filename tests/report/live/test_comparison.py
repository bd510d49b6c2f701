"""A run beside others: its figures are those of its record, or so far, and its curves go over time and samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE, Moment, events_of
from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE
from evener.report.live.feed import MAX_COMPARED, Sources, compared
from evener.report.live.live_run import LiveRun
from support.fake_runs import fake_run
from support.fake_search import fake_search


def test_finished_run_has_the_figures_of_its_record() -> None:
    record = fake_run(num_steps=50)
    run = LiveRun("run")
    run.take(Moment(0.0, events_of(record)))
    found = compared(run)
    assert (found.task, found.is_over, found.num_nodes, found.samples) == ("digits", True, 3, 5000)
    assert found.seconds == record.seconds
    assert found.samples_per_second == pytest.approx(record.samples_per_second)
    assert found.sent_bytes == sum(node.bytes_sent for node in record.nodes)
    assert found.accuracy == record.validation_accuracy
    assert len(found.losses) == 50
    assert found.losses[0][:2] == (record.steps[0].seconds, 100)
    assert found.losses[0].value == pytest.approx(record.steps[0].loss)
    assert [point.samples for point in found.accuracies] == [1000, 2000, 3000, 4000, 5000]


def test_running_run_is_compared_up_to_its_current_step() -> None:
    record = fake_run(num_steps=20)
    run = LiveRun("run")
    run.take(Moment(0.0, [record.plan, *record.steps[:10]]))
    found = compared(run)
    assert (found.is_over, found.samples, found.accuracy) == (False, 1000, None)
    assert found.seconds == pytest.approx(sum(step.seconds for step in record.steps[:10]))
    assert found.sent_bytes == sum(node.sent_bytes for step in record.steps[:10] for node in step.nodes)


def test_run_without_steps_can_be_compared() -> None:
    found = compared(LiveRun("run"))
    assert (found.seconds, found.samples, found.samples_per_second, found.losses) == (0.0, 0, 0.0, [])


def test_only_runs_and_no_searches_can_be_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_noun(fake_run(num_steps=3), tmp_path / name / "record.json")
    write_noun(fake_search(), tmp_path / "search" / STUDY_FILE)
    (tmp_path / "c").mkdir()
    log = EventLog(tmp_path / "c" / EVENTS_FILE, pytest.fail)
    log.add(fake_run().plan)
    sources = Sources([tmp_path / "a"], beside=[tmp_path])
    found = sources.compare(["a", "c", "x"])
    assert sorted(found.choices) == ["a", "b", "c"]
    assert sorted(run.run for run in found.runs) == ["a", "c"]
    assert sources.names() == ["a"]
    log.close()


def test_number_of_compared_runs_is_limited(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(MAX_COMPARED + 2)]
    for name in names:
        (tmp_path / name).mkdir()
        write_noun(fake_run(num_steps=1), tmp_path / name / "record.json")
    assert len(Sources([tmp_path]).compare(names).runs) == MAX_COMPARED
