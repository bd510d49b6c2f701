"""Checkpoints: complete or absent, and everything comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evener.records.errors import InvalidFile, MissingFile, TrainingFailed
from evener.training.checkpoint import Checkpoint, Checkpoints, save_weights
from support.checkpoint_material import Material, state
from support.refusals import refused


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "SGD"])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, optimizer: str) -> None:
    straight, resumed = Material(7, optimizer), Material(0, optimizer)
    Material(4, optimizer).save(tmp_path, 4)
    assert resumed.load(tmp_path) == 4
    for _ in range(3):
        resumed.step()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


def test_newest_two_checkpoints_remain(tmp_path: Path) -> None:
    material = Material(1)
    for step in (1, 2, 3):
        material.save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_missing_checkpoint_raises_missing_file(tmp_path: Path) -> None:
    """The folder lies as deep as that of a run: the message names checkpoints of runs beside it."""
    empty = Checkpoints(tmp_path / "run" / "checkpoints")
    assert empty.is_empty
    with refused(MissingFile):
        empty.latest()


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    Material(1).save(tmp_path, 1)
    other = Material(0)
    other.model = nn.Sequential(nn.Linear(3, 5))
    with refused(InvalidFile):
        other.load(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = Material(1).save(tmp_path, 1)
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with refused(InvalidFile):
        Material(0).load(tmp_path)


def flip(path: Path, at: int, count: int) -> None:
    """Other bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
def test_damaged_checkpoint_is_set_aside_for_the_previous_one(tmp_path: Path, name: str) -> None:
    material = Material(1)
    material.save(tmp_path, 1)
    folder = material.save(tmp_path, 2)
    flip(folder / name, (folder / name).stat().st_size - 9, 4)
    assert Checkpoints(tmp_path).set_aside_damaged() == [tmp_path / "damaged-step-00000002"]
    assert Material(0).load(tmp_path) == 1
    assert Checkpoints(tmp_path).set_aside_damaged() == []


def test_damaged_checkpoints_leave_nothing_to_resume(tmp_path: Path) -> None:
    material = Material(1)
    for step in (1, 2):
        (material.save(tmp_path, step) / "SHA256SUMS").unlink()
    assert len(Checkpoints(tmp_path).set_aside_damaged()) == 2
    with refused(MissingFile):
        Checkpoints(tmp_path).latest()


def test_checkpoint_values_do_not_change_while_training_continues() -> None:
    material = Material(1)
    before = {name: value.clone() for name, value in material.model.state_dict().items()}
    made = Checkpoint.of(state(1), material.model.state_dict(), material.optimizer.state_dict(), None, material.scaler)
    material.step()
    for name, value in before.items():
        assert torch.equal(made.weights[name], value), name
    assert not torch.equal(made.optimizer["0.exp_avg"], material.optimizer.state_dict()["state"][0]["exp_avg"])


def test_state_that_is_not_plain_is_refused_before_publishing(tmp_path: Path) -> None:
    material = Material(1)
    material.scheduler.mystery = object()  # type: ignore[attr-defined]
    with refused(TrainingFailed):
        material.save(tmp_path, 1)
    assert Checkpoints(tmp_path).is_empty


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_weights(model.state_dict(), tmp_path / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert torch.equal(written["1.weight"], written["0.weight"])


_WRITER = """
import sys; sys.path[:0] = {path!r}
from pathlib import Path
from support.checkpoint_material import Material
material, folder, step = Material(1), Path(sys.argv[1]), 0
while True:
    step += 1
    material.step() if step < 15 else None
    material.save(folder, step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [0.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.003, 0.01, 0.02, 0.05))])
def test_latest_checkpoint_survives_a_kill_at_any_moment(tmp_path: Path, after: float) -> None:
    code = _WRITER.format(path=sys.path)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        time.sleep(after)
        os.kill(writer.pid, signal.SIGKILL)
        writer.stdout.read()
    written = Material(0).load(tmp_path)
    assert written >= 3
