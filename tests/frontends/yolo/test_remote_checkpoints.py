"""When a checkpoint of a YOLO is due that its master keeps, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from evener.frontends.yolo import remote_checkpoints
from evener.frontends.yolo.remote_checkpoints import RemoteCheckpoints
from evener.frontends.yolo.results_io import encode_metrics, read_metrics, restore_results, write_results
from evener.frontends.yolo.run_folder import write_checkpoint
from evener.records.errors import InvalidFile
from evener.records.record import WEIGHTS


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(remote_checkpoints, "time", found)
    return found


def trained(folder: Path, rows: str = "epoch,loss\n1,0.5\n") -> Any:
    """What has come to two models and a table."""
    for name, seed in (("best", 1), ("last", 2)):
        torch.manual_seed(seed)
        write_checkpoint(nn.Linear(2, 3), {"imgsz": 64}, folder / "weights" / f"{name}.pt")
    (folder / "results.csv").write_text(rows)
    return SimpleNamespace(best=folder / "weights/best.pt", last=folder / "weights/last.pt", csv=folder / "results.csv")


def test_checkpoint_is_due_at_epoch_ends_or_within_long_epochs(tmp_path: Path, clock: Clock) -> None:
    checkpoints = RemoteCheckpoints(tmp_path, resumes=False)
    for now, at_end, inside in ((9.0, False, False), (10.0, True, False), (599.0, True, False), (600.0, True, True)):
        clock.now = now
        assert checkpoints.is_due(ends_epoch=True) is at_end, now
        assert checkpoints.is_due(ends_epoch=False) is inside, now


def test_checkpoint_writing_takes_at_most_a_fiftieth_of_the_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slowly(trainer: Any, file: Path) -> None:
        write_results(trainer, file)
        clock.now += 2

    monkeypatch.setattr(remote_checkpoints, "write_results", write_slowly)
    checkpoints = RemoteCheckpoints(tmp_path, resumes=False)
    assert checkpoints.write(trained(tmp_path / "run"), b"state", 6).kind == "checkpoint"
    clock.now += 99
    assert not checkpoints.is_due(ends_epoch=True)
    clock.now += 1
    assert checkpoints.is_due(ends_epoch=True)


def test_newest_two_checkpoints_remain_and_the_newest_is_resumed(tmp_path: Path) -> None:
    checkpoints = RemoteCheckpoints(tmp_path, resumes=True)
    for batch in (6, 9, 12):
        assert checkpoints.write(trained(tmp_path / "run"), f"state {batch}".encode(), batch).step == batch
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    assert checkpoints.state() == b"state 12"


@pytest.mark.parametrize("name", [WEIGHTS, "trainer.state", "SHA256SUMS"])
def test_damaged_checkpoint_is_not_resumed(name: str, tmp_path: Path) -> None:
    checkpoints = RemoteCheckpoints(tmp_path, resumes=True)
    checkpoints.write(trained(tmp_path / "run"), b"state of 12", 12)
    file = tmp_path / "checkpoints" / "step-00000012" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidFile, match=re.escape(str(file.parent))):
        checkpoints.state()


def test_unwritable_disk_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder would be")
    told = RemoteCheckpoints(tmp_path, resumes=False).write(trained(tmp_path / "run"), b"state", 6)
    assert (told.step, told.kind) == (6, "no checkpoint")
    assert told.message.startswith(f"cannot write the checkpoint of step 6 in {tmp_path / 'checkpoints'}: ")


def test_results_are_sent_as_tensors_and_restored_as_yolo_files(tmp_path: Path) -> None:
    trainer, file, model = trained(tmp_path / "there"), tmp_path / "results.safetensors", nn.Linear(2, 3)
    write_results(trainer, file)
    with safe_open(file, framework="pt") as sent:
        assert sorted(sent.keys()) == ["best.bias", "best.weight", "last.bias", "last.weight"]
    restore_results(model, {"imgsz": 64}, file, tmp_path / "here")
    for name in ("best", "last"):
        here, there = (
            torch.load(tmp_path / place / "weights" / f"{name}.pt", weights_only=False) for place in ("here", "there")
        )
        assert torch.equal(here["model"].weight, there["model"].weight.half())
        assert here["train_args"] == {"imgsz": 64}
    assert (tmp_path / "here" / "results.csv").read_text() == trainer.csv.read_text()


def test_training_ended_before_its_first_epoch_restores_nothing(tmp_path: Path) -> None:
    nothing = SimpleNamespace(best=tmp_path / "best.pt", last=tmp_path / "last.pt", csv=tmp_path / "results.csv")
    write_results(nothing, tmp_path / "results.safetensors")
    restore_results(nn.Linear(2, 3), {}, tmp_path / "results.safetensors", tmp_path / "here")
    assert not (tmp_path / "here").exists()


class Inner(SimpleNamespace):
    """An object within metrics."""


Inner.__module__ = "ultralytics.utils.metrics"


def measured(**attributes: Any) -> Any:
    """Metrics as Ultralytics has them: numbers and arrays in an object, and in one that it contains."""
    return SimpleNamespace(**attributes, box=Inner(all_ap=[], nc=0), speed={"loss": 0.0})


def test_metrics_are_sent_as_numbers(tmp_path: Path) -> None:
    trainer, file = trained(tmp_path / "there"), tmp_path / "results.safetensors"
    found = measured(names={np.int64(0): "dark"}, curve=np.array([[1.0, 0.5]], np.float32))
    found.box.all_ap, found.box.nc, found.box.hidden = np.eye(2), np.int64(2), object()
    trainer.validator, trainer.best_fitness = SimpleNamespace(metrics=found), np.float64(0.25)
    write_results(trainer, file, metrics=encode_metrics(trainer))
    metrics = measured()
    assert read_metrics(file, metrics)["best_fitness"] == 0.25
    assert (metrics.names, metrics.box.nc, metrics.speed) == ({0: "dark"}, 2, {"loss": 0.0})
    assert metrics.box.all_ap.tolist() == np.eye(2).tolist()
    assert (metrics.curve.dtype, metrics.curve.tolist()) == (np.float32, [[1.0, 0.5]])
    restore_results(nn.Linear(2, 3), {}, file, tmp_path / "here")
    assert (tmp_path / "here" / "weights" / "best.pt").exists()


OF_TRAINER = dict.fromkeys(("fitness", "best_fitness", "epoch", "epochs", "start_epoch", "metrics"))


@pytest.mark.parametrize(
    "content",
    [
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"trainer": {}, "metrics": {}}),
        msgspec.msgpack.encode({"trainer": OF_TRAINER, "metrics": {"curve": {"array": ["<f8", [10**12], b""]}}}),
        msgspec.msgpack.encode({"trainer": OF_TRAINER, "metrics": {"curve": {"array": ["O", [1], bytes(8)]}}}),
        msgspec.msgpack.encode({"trainer": OF_TRAINER, "metrics": {5: 1}}),
    ],
)
def test_metrics_of_a_hostile_node_are_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "results.safetensors"
    write_results(trained(tmp_path / "there"), file, metrics=content)
    with pytest.raises(InvalidFile):
        read_metrics(file, measured())
    save_file({"metrics": torch.zeros(3, dtype=torch.bfloat16)}, file)
    with pytest.raises(InvalidFile):
        read_metrics(file, measured())


def test_metrics_that_are_no_numbers_do_not_end_a_training_that_is_over(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "there")
    circle = list[Any]()
    circle.append(circle)
    trainer.validator = SimpleNamespace(metrics=SimpleNamespace(circle=circle, owner=trainer))
    assert encode_metrics(trainer) == b""
    write_results(trainer, tmp_path / "results.safetensors", metrics=b"")
    assert read_metrics(tmp_path / "results.safetensors", measured()) == {}


def test_metrics_of_a_node_leave_what_their_class_defines(tmp_path: Path) -> None:
    class Metrics:
        def fitness(self) -> float:
            return 1.0

    file, metrics = tmp_path / "results.safetensors", Metrics()
    sent = msgspec.msgpack.encode(
        {"trainer": OF_TRAINER, "metrics": {"fitness": 5, "__class__": 3, "names": {0: "dark"}}}
    )
    write_results(trained(tmp_path / "there"), file, metrics=sent)
    read_metrics(file, metrics)
    assert (metrics.fitness(), vars(metrics)) == (1.0, {"names": {0: "dark"}})
