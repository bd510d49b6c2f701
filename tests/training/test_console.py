"""What is printed is printed as it is: sentences name extras, shapes and paths in brackets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.records.errors import EvenerError, NodeLost
from evener.records.event_tail import EVENTS_FILE, EventTail, Moment
from evener.records.events import Phase, RunEvent
from evener.records.record import Event, TrainRecord, Validation
from evener.records.schema import read_noun
from evener.report.live.live_run import LiveRun
from evener.system import sign_of_life
from evener.training import console
from evener.training.console import RunView, open_console, progress_words
from evener.training.partial_record import RunRequest
from support.fake_runs import fake_plan, fake_run


def signs_of(
    events: list[RunEvent], folder: Path, capsys: pytest.CaptureFixture[str], *, shows_steps: bool = True
) -> str:
    """Return what a view without a terminal prints of `events`, up to the second sign of life after the last one."""
    with RunView(folder, shows_steps=shows_steps) as view:
        for event in events:
            view(event)
        printed, until = "", time.monotonic() + 20
        while printed.count(" s)") < 2 and time.monotonic() < until:
            time.sleep(0.01)
            printed += capsys.readouterr().out
    return printed


@pytest.mark.parametrize("shows_steps", [True, False])
def test_log_repeats_a_long_phase(
    shows_steps: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_of_life, "_SILENCE_SECONDS", 0.02)
    joining = Phase(what="joining", detail="the master and its nodes")
    printed = signs_of([joining], tmp_path, capsys, shows_steps=shows_steps)
    assert printed.startswith("joining: the master and its nodes\njoining: the master and its nodes (")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (fake_plan(), "training: the next step ("),
        (Event(step=0, kind="begins again", message="node b is lost"), "starting: the nodes ("),
    ],
)
def test_log_repeats_the_wait_for_the_first_step(
    event: RunEvent, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_of_life, "_SILENCE_SECONDS", 0.02)
    checking = Phase(what="checking", detail="that the nodes learn what one process learns")
    *_, last = signs_of([checking, event], tmp_path, capsys).splitlines()
    assert last.startswith(line)


@pytest.mark.parametrize("sentence", ["pip install 'evener[report]'", "size [1, 8]", "[/tmp/run] is not a folder"])
def test_brackets_are_not_markup(sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_console(to_stderr=False).print(sentence)
    assert capsys.readouterr().out == sentence + "\n"


def losing_bob(folder: Path, *, is_quiet: bool = True) -> None:
    with RunView(folder) as view:
        view.console.quiet = is_quiet
        view(fake_plan())
        raise NodeLost("ann waited for node bob (rank 1), which was killed at step 3", ["bob"])


def test_log_of_a_run_names_a_lost_node(tmp_path: Path) -> None:
    with pytest.raises(NodeLost):
        losing_bob(tmp_path)
    [*_, lost, end] = [event for moment in EventTail(tmp_path / EVENTS_FILE).read() for event in moment.events]
    assert isinstance(lost, Event)
    assert (lost.kind, lost.nodes) == ("node lost", ("bob",))  # ann is named in the sentence, and was not lost
    assert isinstance(end, Phase)
    assert end.what == "failed"


def failing_after(steps: int, folder: Path) -> None:
    with RunView(folder, request=RunRequest("digits", seed=3, precision="fp64")) as view:
        view.console.quiet = True
        view(fake_plan())
        view(Phase(what="training", num_samples=1000, epochs=5))
        for step in fake_run(num_steps=steps).steps:
            view(step)
        view(Validation(step=steps, epoch=0, loss=0.5, accuracy=0.75, seconds=0.1))
        raise NodeLost("node bob (rank 1) was killed at step 3")


def test_failed_run_leaves_a_record(tmp_path: Path) -> None:
    with pytest.raises(NodeLost):
        failing_after(3, tmp_path)
    record = read_noun(tmp_path / "record.json", TrainRecord)
    assert record.ending == "node bob (rank 1) was killed at step 3"
    assert (record.task, record.seed, record.precision, record.epochs) == ("digits", 3, "fp64", 5)
    assert record.steps[-1].step == 3
    assert sum(step.samples for step in record.steps) == sum(step.samples for step in fake_run(num_steps=3).steps)
    assert [node.name for node in record.nodes] == [one.node for one in fake_plan().assignments]
    assert record.validation_accuracy == 0.75
    assert [event.kind for event in record.events] == ["node lost"]


def test_run_that_lost_a_node_names_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NodeLost):
        losing_bob(tmp_path, is_quiet=False)
    assert "--resume" not in capsys.readouterr().out
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(NodeLost):
        losing_bob(tmp_path, is_quiet=False)
    assert f"--resume --checkpoint {tmp_path / 'checkpoints'}" in "".join(capsys.readouterr().out.split("\n"))


def test_process_ended_by_a_thread_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[EvenerError] = []
    monkeypatch.setattr(console, "end_process", ended.append)
    view, lost = RunView(tmp_path), NodeLost("node bob (rank 1) was killed at step 3")
    view.console.quiet = True
    view(fake_plan())
    for step in fake_run(num_steps=3).steps:
        view(step)
    thread = threading.Thread(target=view.end_process, args=(lost,))
    thread.start()
    thread.join(10)
    assert ended == [lost]
    assert read_noun(tmp_path / "record.json", TrainRecord).ending == str(lost)


def test_run_that_fails_before_its_first_step_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(NodeLost):
        losing_bob(tmp_path)
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("width", "last"), [(120, "waits for bob"), (75, "of the ideal"), (50, "samples/s"), (10, "epoch 1")]
)
def test_step_line_shows_as_much_as_fits(width: int, last: str) -> None:
    run, record = LiveRun("run"), fake_run(num_steps=60)
    run.take(Moment(0.0, [record.plan]))
    run.take(Moment(1.0, list(record.steps)))
    picture = run.picture()
    nodes = [replace(node, is_waited_for=node.name == "bob") for node in picture.nodes]
    picture = replace(picture, epoch=1, left_seconds=3601.0, nodes=nodes)
    words = progress_words(picture, width)
    assert len(words) <= max(width, len("epoch 1"))
    assert words.endswith(last)
