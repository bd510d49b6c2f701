"""A page is sent what it lacks, once; folders are looked into again and again."""

from __future__ import annotations

from pathlib import Path

from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import RunEvent
from evener.records.schema import write_noun
from evener.report.live.feed import Cursor, Source, Sources
from support.fake_runs import fake_run


def begun(folder: Path, num_steps: int = 10) -> EventLog:
    folder.mkdir()
    seconds = iter(range(10**6))
    log = EventLog(folder / EVENTS_FILE, print, lambda: float(next(seconds)))
    record = fake_run(num_steps=num_steps)
    events: list[RunEvent] = [record.plan, *record.steps, record.validations[0]]
    for event in events:
        log.add(event)
    return log


def test_page_receives_the_whole_run_first_and_then_updates(tmp_path: Path) -> None:
    log = begun(tmp_path / "a")
    source = Source(tmp_path / "a", "a")
    cursor = Cursor(source)
    source.poll()
    first = cursor.next(["a"])
    assert first is not None
    assert (first.is_whole, len(first.points), len(first.columns), len(first.log)) == (True, 10, 10, 1)
    source.poll()
    assert cursor.next(["a"]) is None
    for step in fake_run(num_steps=12).steps[10:]:
        log.add(step)
    source.poll()
    more = cursor.next(["a"])
    assert more is not None
    assert (more.is_whole, [point.step for point in more.points], more.log) == (False, [11, 12], [])
    assert [column.step for column in more.columns] == [11, 12]
    log.close()


def test_second_page_receives_the_whole_run_too(tmp_path: Path) -> None:
    begun(tmp_path / "a").close()
    source = Source(tmp_path / "a", "a")
    source.poll()
    first, second = Cursor(source).next([]), Cursor(source).next([])
    assert first == second


def test_new_runs_in_a_folder_of_runs_are_found(tmp_path: Path) -> None:
    sources = Sources([tmp_path])
    assert (sources.names(), sources.find("")) == ([], None)
    begun(tmp_path / "a").close()
    (tmp_path / "b").mkdir()
    write_noun(fake_run(num_steps=3), tmp_path / "b" / "record.json")
    assert sources.names() == ["b", "a"]
    found = sources.find("a")
    assert found is not None
    assert found.poll().picture().step == 10
    newest = sources.find("")
    assert newest is not None
    assert newest.poll().picture().is_over


def test_unreadable_record_is_reported(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    run = Source(tmp_path, "x").poll()
    assert run.picture().phase == "failed"
    assert "record.json" in run.picture().detail


def test_runs_with_the_same_name_are_numbered(tmp_path: Path) -> None:
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        begun(tmp_path / parent / "run").close()
    assert sorted(Sources([tmp_path / "one", tmp_path / "two"]).names()) == ["run", "run (2)"]
