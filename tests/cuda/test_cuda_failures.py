"""A device that is lost or full ends a run with the error that says so, wherever the task or Evener meets it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.accelerator import DEVICE, NEEDS_DEVICE, slow_after
from support.commands import TINY, evener

STRIKING = str(Path(TINY).with_name("striking.py"))
pytestmark = [
    *NEEDS_DEVICE,
    pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost"),
    pytest.mark.timeout(300),
]


def run(folder: Path, fault: str, moment: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return a run on two devices, of which the second is struck once."""
    (folder / "moment").write_text(moment)
    options = ("--option", "samples=200", "--option", "pause=0.02", "--epochs", "6", "--seed", "3", "--output", "run")
    on = ("--devices", "standin:0,standin:1", "--shares", "1,1")
    environment = {"EVENER_TEST_STRIKE": str(folder / "moment"), "EVENER_TEST_FAULT": fault}
    ran = evener("train", STRIKING, *options, *on, *words, cwd=folder, timeout=200, **environment)
    assert not (folder / "moment").exists(), ran.stderr
    return ran


@pytest.mark.parametrize("moment", slow_after(1, ("step",), ("loss",)))
def test_lost_device_is_a_lost_node_of_an_elastic_run(tmp_path: Path, moment: str) -> None:
    ran = run(tmp_path, "lost", moment, "--elastic")
    assert ran.returncode == 0, ran.stderr
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    (event,) = [event for event in record.events if event.kind == "node lost"]
    assert "node-1 (rank 1) lost its device standin:1" in event.message
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["made"])
def test_elastic_run_begins_again_after_a_loss_before_the_first_step(tmp_path: Path, moment: str) -> None:
    ran = run(tmp_path, "lost", moment, "--elastic")
    assert ran.returncode == 0, ran.stderr
    (event,) = [words for words in " ".join(ran.stderr.split()).split(" step ") if "begins again: " in words]
    assert "node node-1 (rank 1) lost its device standin:1" in event


@pytest.mark.parametrize("moment", slow_after(1, ("step",), ("loss",), ("made",)))
def test_run_that_cannot_go_on_names_the_node_whose_device_is_lost(tmp_path: Path, moment: str) -> None:
    ran = run(tmp_path, "lost", moment, "--no-elastic")
    assert ran.returncode == 4, ran.stderr
    assert "node node-1 (rank 1) lost its device standin:1" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("moment", slow_after(1, ("step",), ("made",)))
@pytest.mark.parametrize("elastic", slow_after(1, ("--no-elastic",), ("--elastic",)))
def test_full_device_does_not_fit(tmp_path: Path, moment: str, elastic: str) -> None:
    ran = run(tmp_path, "full", moment, elastic)
    assert ran.returncode == 5, ran.stderr
    assert "node node-1 ran out of memory" in ran.stderr.splitlines()[-1]
