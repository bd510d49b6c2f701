"""An elastic run of accelerators and processors under kills, freezes and joins: the weights of a calm run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.accelerator import DEVICE, NEEDS_DEVICE, devices, distance
from support.command_cluster import wait_until
from support.commands import command, evener_here
from support.struck_runs import ranks_of

pytestmark = [*NEEDS_DEVICE, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]
EVENTS = int(os.environ.get("EVENER_STORM", "40"))
"""Kills, freezes and joins; EVENER_STORM=200 for a long storm."""
SAMPLES, EPOCHS, BATCH, PATIENCE = 2000, 60, 10, 3.0
TASK = f"""
import os, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

FOLDER = Path(__file__).parent

def data():
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, ({SAMPLES},), generator=draw)
    return TensorDataset(torch.randn({SAMPLES}, 8, generator=draw) + targets[:, None], targets)

def loss(outputs, targets):
    if outputs.requires_grad and (FOLDER / "storm").exists():
        (FOLDER / "trains" / str(os.getpid())).touch()
        time.sleep(0.1)
    return nn.functional.cross_entropy(outputs, targets)

task = Task(
    name="storm",
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    loss=loss,
    train_data=data,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01),
    batch_size={BATCH},
    epochs={EPOCHS},
)
"""


def test_storm_on_accelerators_leaves_the_weights_of_a_calm_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "trains").mkdir()
    words = ("train", "task.py", "--precision", "fp64", "--seed", "3")
    calm = evener_here(*words, "--devices", "cpu", "--no-check", "--output", "calm", cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    (tmp_path / "storm").touch()
    on = devices("gpu", "standin:1" if DEVICE.startswith("standin") else "gpu", "cpu", "cpu")
    more = ("--devices", on, "--elastic", "--shares", "4,3,2,1", "--patience", str(PATIENCE), "--output", "struck")
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command(*words, *more), cwd=tmp_path, stdout=said, stderr=said)
    request.addfinalizer(process.wait)
    request.addfinalizer(process.kill)  # which is called first, and does nothing if the run has ended
    wait_until(lambda: "step 1 " in (tmp_path / "said").read_text(), "that measuring, which trains as well, ends")
    for file in (tmp_path / "trains").iterdir():
        file.unlink()
    draw, strikes, struck = random.Random(0), 0, 0
    while 2 * strikes < EVENTS:
        struck = draw.choice(all_training(tmp_path, process, struck))
        how = draw.choice([signal.SIGKILL, signal.SIGSTOP])
        os.kill(struck, how)
        strikes += 1
        if how == signal.SIGSTOP:
            wait_until(partial(has_lost, tmp_path, strikes), "that the frozen node counts as lost")
            os.kill(struck, signal.SIGCONT)  # it hears that the others went on without it, and ends
    all_training(tmp_path, process, struck)
    (tmp_path / "storm").unlink()
    assert process.wait(timeout=300) == 0, (tmp_path / "said").read_text()[-3000:]
    record = read_noun(tmp_path / "struck" / "record.json", TrainRecord)
    assert distance(*(load_file(tmp_path / name / "model.safetensors") for name in ("calm", "struck"))) < 1e-10
    assert sum(step.samples for step in record.steps) == SAMPLES * EPOCHS
    assert len([event for event in record.events if event.kind == "node lost"]) == strikes
    assert len([event for event in record.events if event.kind == "joined"]) == strikes


def has_lost(folder: Path, nodes: int) -> bool:
    return (folder / "said").read_text().count("node lost: ") == nodes


def all_training(folder: Path, process: subprocess.Popen[bytes], struck: int) -> list[int]:
    """The ids of four ranks, once all of them have computed gradients, and the one that was struck is gone."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, (folder / "said").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "said").read_text()[-3000:]
        ranks = [rank.pid for rank in ranks_of(process.pid)]
        if len(ranks) == 4 and struck not in ranks and all((folder / "trains" / str(pid)).exists() for pid in ranks):
            return ranks
        time.sleep(0.05)
