"""Checkpoints: complete or absent, and everything comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evener.comm.joining import join_group
from evener.errors import InvalidFile, MissingFile, TrainingFailed
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.run.checkpoint import Checkpoint, Checkpoints, CheckpointState, save_weights


def state(step: int) -> CheckpointState:
    return CheckpointState(task="t", step=step, seed=1, batch_size=4, accumulate=1, samples=9, precision="fp32")


_OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Material:
    """A model, an optimiser and a schedule, some steps on."""

    def __init__(self, steps: int, optimizer: str = "Adam") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model[2].bias = self.model[2].bias
        self.optimizer = _OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(steps):
            self.step()

    @property
    def joint(self) -> ReplicatedModel:
        alone = join_group(rank=0, nodes=["n0"], device=torch.device("cpu"), store=None, patience=1)
        return ReplicatedModel(self.model, alone, Criterion(loss=nn.MSELoss(), autocast=nullcontext, scale=abs))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(12.0).view(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def save(self, folder: Path, step: int) -> Path:
        weights, optimizer = self.joint.gather_weights(), self.optimizer.state_dict()
        made = Checkpoint.of(state(step), weights, optimizer, self.scheduler, self.scaler)
        return Checkpoints(folder).write(made)

    def load(self, folder: Path) -> int:
        checkpoints = Checkpoints(folder)
        path, found = checkpoints.latest()
        optimizer = ModelOptimizer(lambda _: self.optimizer, self.joint.held())
        checkpoints.load(path, found, self.joint, optimizer, self.scheduler, self.scaler)
        return found.step


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "SGD"])
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path, optimizer: str) -> None:
    straight, resumed = Material(7, optimizer), Material(0, optimizer)
    Material(4, optimizer).save(tmp_path, 4)
    assert resumed.load(tmp_path) == 4
    for _ in range(3):
        resumed.step()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    material = Material(1)
    for step in (1, 2, 3):
        material.save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_nothing_to_resume_from_is_one_sentence(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").is_empty
    with pytest.raises(MissingFile, match=r"no checkpoint to resume from in .*start without --resume"):
        Checkpoints(tmp_path / "none").latest()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    Material(1).save(tmp_path, 1)
    other = Material(0)
    other.model = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(InvalidFile, match="does not fit this model"):
        other.load(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = Material(1).save(tmp_path, 1)
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(InvalidFile, match="does not fit this model"):
        Material(0).load(tmp_path)


def flip(path: Path, at: int, count: int) -> None:
    """Other bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
def test_a_checkpoint_that_was_damaged_is_set_aside_and_the_one_before_taken(tmp_path: Path, name: str) -> None:
    material = Material(1)
    material.save(tmp_path, 1)
    folder = material.save(tmp_path, 2)
    flip(folder / name, (folder / name).stat().st_size - 9, 4)
    assert Checkpoints(tmp_path).set_aside_damaged() == [tmp_path / "damaged-step-00000002"]
    assert Material(0).load(tmp_path) == 1
    assert Checkpoints(tmp_path).set_aside_damaged() == []


def test_where_all_are_damaged_none_is_taken(tmp_path: Path) -> None:
    material = Material(1)
    for step in (1, 2):
        (material.save(tmp_path, step) / "SHA256SUMS").unlink()
    assert len(Checkpoints(tmp_path).set_aside_damaged()) == 2
    with pytest.raises(MissingFile, match="no checkpoint to resume"):
        Checkpoints(tmp_path).latest()


def test_what_is_copied_stays_while_training_goes_on() -> None:
    material = Material(1)
    before = {name: value.clone() for name, value in material.model.state_dict().items()}
    made = Checkpoint.of(state(1), material.model.state_dict(), material.optimizer.state_dict(), None, material.scaler)
    material.step()
    for name, value in before.items():
        assert torch.equal(made.weights[name], value), name
    assert not torch.equal(made.optimizer["0.exp_avg"], material.optimizer.state_dict()["state"][0]["exp_avg"])


def test_state_that_is_no_plain_value_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    material = Material(1)
    material.scheduler.mystery = object()  # type: ignore[attr-defined]
    with pytest.raises(TrainingFailed, match="the state of the learning-rate schedule holds a object"):
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
from test_checkpoint import Material
material, folder, step = Material(1), Path(sys.argv[1]), 0
while True:
    step += 1
    material.step() if step < 15 else None
    material.save(folder, step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [0.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.003, 0.01, 0.02, 0.05))])
def test_killed_at_any_moment_the_last_good_one_is_there(tmp_path: Path, after: float) -> None:
    code = _WRITER.format(path=[str(Path(__file__).parent), *sys.path])
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        time.sleep(after)
        os.kill(writer.pid, signal.SIGKILL)
        writer.stdout.read()
    written = Material(0).load(tmp_path)
    assert written >= 3
