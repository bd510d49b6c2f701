"""events.jsonl: what happened comes back, the first lines as chapters; a torn line and a full disk cost no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE, EventTail, events_of
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.record import Epoch, Event, Step, TrainRecord, Validation
from support.fake_runs import fake_plan, fake_run


def slow_clock() -> Iterator[float]:
    """A clock by which every event is a moment of its own."""
    return (float(second) for second in count(1))


def written(path: Path, events: list[RunEvent]) -> None:
    clock = slow_clock()
    log = EventLog(path, pytest.fail, lambda: next(clock))
    for event in events:
        log.add(event)
    log.close()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log is a large one."""
    monkeypatch.setattr("evener.records.event_tail._SMALL", 0)


def read(path: Path) -> list[RunEvent]:
    return [event for moment in EventTail(path).read() for event in moment.events]


def test_events_are_read_back_in_order(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=5)
    note = Event(step=3, kind="excluded", message="node bob: late", nodes=("bob",))
    events: list[RunEvent] = [Phase(what="training", num_samples=500), record.plan, *record.steps, note]
    written(path, events)
    assert [type(event) for event in read(path)] == [Phase, Plan, *[Step] * 5, Event]
    assert read(path)[-1] == note
    assert [event.samples for event in read(path) if isinstance(event, Step)] == [100] * 5


def test_steps_within_a_moment_are_summed(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=20)
    log = EventLog(path, pytest.fail, lambda: 0.1)
    events: list[RunEvent] = [record.plan, *record.steps, record.validations[0]]
    for event in events:
        log.add(event)
    log.close()
    found = read(path)
    assert [type(event) for event in found] == [Plan, Validation, Step]
    total = found[-1]
    assert isinstance(total, Step)
    assert (total.step, total.samples) == (20, 2000)
    assert total.seconds == pytest.approx(sum(step.seconds for step in record.steps))
    assert total.nodes[1].compute_seconds == pytest.approx(sum(step.nodes[1].compute_seconds for step in record.steps))
    assert total.loss == pytest.approx(sum(step.loss or 0.0 for step in record.steps) / 20)


def test_steps_before_and_after_a_plan_are_not_summed(tmp_path: Path) -> None:
    path, plan = tmp_path / EVENTS_FILE, fake_plan()
    steps = fake_run(num_steps=4).steps
    log = EventLog(path, pytest.fail, lambda: 0.1)
    events: list[RunEvent] = [*steps[:2], plan, *steps[2:]]
    for event in events:
        log.add(event)
    log.close()
    assert [getattr(event, "step", 0) for event in read(path)] == [2, 0, 4]


@pytest.mark.usefixtures("large")
def test_late_reader_gets_chapters_and_then_lines(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=400)
    notes = [Event(step=100, kind="joined", message="node eve joined", nodes=("eve",))]
    events: list[RunEvent] = [record.plan, *record.steps[:100], *notes, *record.steps[100:]]
    written(path, events)
    found = read(path)
    steps = [event for event in found if isinstance(event, Step)]
    assert len(steps) < 80
    assert sum(step.samples for step in steps) == 100 * 400
    assert steps[-1].step == 400
    assert [step.step for step in steps] == sorted(step.step for step in steps)
    assert [event for event in found if isinstance(event, Event)] == notes


def test_late_reader_gets_every_line_of_a_small_log(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=400)
    written(path, [record.plan, *record.steps])
    assert [event.step for event in read(path) if isinstance(event, Step)] == list(range(1, 401))


def test_follower_reads_every_line_once(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=300)
    clock, tail = slow_clock(), EventTail(path)
    assert tail.read() == []
    log = EventLog(path, pytest.fail, lambda: next(clock))
    found: list[RunEvent] = []
    events: list[RunEvent] = [record.plan, *record.steps]
    for event in events:
        log.add(event)
        found += [one for moment in tail.read() for one in moment.events]
    log.close()
    assert [event.step for event in found if isinstance(event, Step)] == list(range(1, 301))


@pytest.mark.parametrize("torn", [b'{"back":17,"time":3.0,"eve', b'{"time":3.0,"eve'])
def test_log_continues_after_a_truncated_line(tmp_path: Path, torn: bytes) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=200)
    written(path, [record.plan, *record.steps[:100]])
    with path.open("ab") as file:
        file.write(torn)
    written(path, [record.plan, *record.steps[100:]])
    steps = [event for event in read(path) if isinstance(event, Step)]
    assert sum(step.samples for step in steps) == 100 * 200


def test_unreadable_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    written(path, [Phase(what="measuring")])
    with path.open("ab") as file:
        file.write(b'{"time":1.0,"events":[["Unheard",{}]]}\n{"time":1.0\n')
    assert [getattr(event, "kind", "") for event in read(path)] == ["", "damaged line", "damaged line"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("back", [lambda at: at, lambda at: at + 1, lambda at: -1, lambda at: 10], ids="=>-<")
def test_chapter_without_a_valid_predecessor_ends_the_reading(tmp_path: Path, back: Callable[[int], int]) -> None:
    path = tmp_path / EVENTS_FILE
    written(path, [fake_plan(), *fake_run(num_steps=200).steps])
    data = path.read_bytes()
    at = data.rindex(b'{"back":')
    end = data.index(b",", at)
    path.write_bytes(data[:at] + b'{"back":%d' % back(at) + data[end:])
    kinds = [event.kind for event in read(path) if isinstance(event, Event)]
    assert kinds == (["damaged line"] if back(at) == 10 else [])
    assert any(isinstance(event, Step) for event in read(path))


def test_record_is_stored_without_steps_and_epochs_are_not_stored(tmp_path: Path) -> None:
    path, record = tmp_path / EVENTS_FILE, fake_run(num_steps=9)
    written(path, [Epoch(step=9, epoch=0, loss=1.0), record])
    [found] = read(path)
    assert isinstance(found, TrainRecord)
    assert (found.steps, found.task) == ((), record.task)
    assert [type(event) for event in events_of(record)].count(Step) == 9


def test_full_disk_is_reported_once(tmp_path: Path) -> None:
    told: list[str] = []
    log = EventLog(tmp_path / "gone" / EVENTS_FILE, told.append)
    for _ in range(3):
        log.add(Phase(what="measuring"))
    log.close()
    assert told == [
        f"cannot write {tmp_path}/gone/events.jsonl (No such file or directory): the live page of this run has stopped"
    ]
