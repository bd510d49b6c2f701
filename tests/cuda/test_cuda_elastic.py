"""A run of accelerators goes on when a process of it is killed or frozen, and trains what one process trains."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.accelerator import DEVICE, NEEDS_DEVICE, TOLERANCE, devices, slow_after
from support.commands import TINY, evener, evener_here
from support.struck_runs import WORDS, distance, run_with

LOSING = str(Path(TINY).with_name("losing.py"))
pytestmark = [*NEEDS_DEVICE, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """Return the folder of a run of one process on the CPU."""
    result = evener_here(*WORDS, "--output", "alone", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return tmp_path / "alone"


@pytest.mark.slow
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("on", [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_run_with_a_lost_first_rank_equals_one_process(
    tmp_path: Path, alone: Path, on: tuple[str, ...], strike: signal.Signals
) -> None:
    more = ("--patience", "8", "--elastic")
    record = run_with(tmp_path, strike, "2,1", 0.05, *more, devices=devices(*on), start_seconds=120)
    assert distance(alone, tmp_path / "struck") < TOLERANCE
    lost = [event.message for event in record.events if event.kind == "node lost"]
    assert len(lost) == 1
    assert lost[0].startswith("node-0 ")
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost")
@pytest.mark.parametrize("on", slow_after(0, (("gpu", "standin:1"),), (("gpu", "cpu"),)))
def test_lost_device_is_a_lost_node(tmp_path: Path, alone: Path, on: tuple[str, ...]) -> None:
    (tmp_path / "here").touch()
    words = ("--devices", devices(*on), "--elastic", "--shares", "2,1", "--option", "pause=0.02", "--output", "struck")
    environment = {"EVENER_TEST_LOSS": str(tmp_path / "here")}
    ran = evener("train", LOSING, *WORDS[2:], *words, cwd=tmp_path, timeout=200, **environment)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "here").exists()
    record = read_noun(tmp_path / "struck" / "record.json", TrainRecord)
    (lost,) = [event.message for event in record.events if event.kind == "node lost"]
    assert "lost its device standin:0" in lost
    assert distance(alone, tmp_path / "struck") < TOLERANCE
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.slow
@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can hang")
def test_device_that_hangs_is_a_lost_node(tmp_path: Path, alone: Path) -> None:
    (tmp_path / "here").touch()
    words = ("--devices", devices("gpu", "standin:1"), "--elastic", "--shares", "2,1", "--patience", "3")
    environment = {"EVENER_TEST_LOSS": str(tmp_path / "here"), "EVENER_TEST_HANGS": "1"}
    more = ("--option", "pause=0.02", "--output", "struck")
    ran = evener("train", LOSING, *WORDS[2:], *words, *more, cwd=tmp_path, timeout=200, **environment)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "here").exists()
    record = read_noun(tmp_path / "struck" / "record.json", TrainRecord)
    (lost,) = [event.message for event in record.events if event.kind == "node lost"]
    assert "lost its device standin:0" in lost
    assert "it has finished nothing for" in lost
    assert distance(alone, tmp_path / "struck") < TOLERANCE
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.slow
@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can hang")
@pytest.mark.parametrize("on", [("gpu",), ("gpu", "standin:1")], ids=len)
def test_run_that_cannot_go_on_ends_by_the_device_that_hangs(tmp_path: Path, on: tuple[str, ...]) -> None:
    (tmp_path / "here").touch()
    shares = ("--shares", "2,1") if len(on) == 2 else ()
    words = ("--devices", devices(*on), *shares, "--no-elastic", "--patience", "3", "--option", "pause=0.02")
    environment = {"EVENER_TEST_LOSS": str(tmp_path / "here"), "EVENER_TEST_HANGS": "1"}
    ran = evener("train", LOSING, *WORDS[2:], *words, "--output", "struck", cwd=tmp_path, timeout=200, **environment)
    assert ran.returncode == 4, ran.stderr
    assert not (tmp_path / "here").exists()
    assert "lost its device standin:0" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("data+filter", "--replicas", "2,1"), ("pipeline", "--micro-batches", "1")], ids=lambda words: words[0]
)
def test_divided_run_with_a_killed_rank_equals_one_process(tmp_path: Path, alone: Path, words: tuple[str, ...]) -> None:
    more = ("--patience", "20", "--elastic", "--strategy", *words)
    on = devices("gpu", "gpu", "cpu")
    record = run_with(tmp_path, signal.SIGKILL, "1,1,1", 0.05, *more, devices=on, start_seconds=150)
    assert distance(alone, tmp_path / "struck") < TOLERANCE
    assert len([event for event in record.events if event.kind == "node lost"]) == 1
    assert sum(step.samples for step in record.steps) == 6 * 200
