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
    """Train on two devices; a fault strikes the second one once."""
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
@pytest.mark.parametrize("moment", ["check", "made"])
def test_elastic_run_begins_again_after_a_loss_before_the_first_step(tmp_path: Path, moment: str) -> None:
    ran = run(tmp_path, "lost", moment, "--elastic")
    assert ran.returncode == 0, ran.stderr
    (event,) = " ".join(f"{ran.stdout} {ran.stderr}".split()).split("begins again: ")[1:]
    assert "node node-1 (rank 1) lost its device standin:1" in event


@pytest.mark.parametrize("moment", slow_after(0, ("step",), ("loss",), ("check",), ("made",)))
def test_run_that_cannot_go_on_names_the_node_whose_device_is_lost(tmp_path: Path, moment: str) -> None:
    ran = run(tmp_path, "lost", moment, "--no-elastic")
    assert ran.returncode == 4, ran.stderr
    assert "node node-1 (rank 1) lost its device standin:1" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("moment", slow_after(0, ("check",), ("step",), ("made",)))
@pytest.mark.parametrize("elastic", slow_after(1, ("--no-elastic",), ("--elastic",)))
def test_full_device_does_not_fit(tmp_path: Path, moment: str, elastic: str) -> None:
    ran = run(tmp_path, "full", moment, elastic)
    assert ran.returncode == 5, ran.stderr
    assert "node node-1 ran out of memory" in ran.stderr.splitlines()[-1]


LIMITED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task
from support import standin

def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(60, 36, generator=draw), torch.randint(0, 3, (60,), generator=draw))

def model():
    standin.load().limit_memory(1, 28_000_000)
    return nn.Sequential(nn.Linear(36, 20_000), nn.Tanh(), nn.Linear(20_000, 3))

task = Task(model=model, loss=nn.functional.cross_entropy, train_data=data, batch_size=10, epochs=1)
"""
"""A model with 3.2 MB of weights, whose check takes about 13 MB in single precision."""


@pytest.mark.slow
def test_check_leaves_out_double_precision_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(LIMITED)
    words = ("--devices", "standin:0,standin:1", "--shares", "1,1", "--output", "run")
    ran = evener("train", "task.py", *words, cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    check = read_noun(tmp_path / "run" / "record.json", TrainRecord).plan.check
    assert check is not None
    assert check.precisions == ("fp32",)
