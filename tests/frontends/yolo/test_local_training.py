"""Nodes of a master that train a model of Ultralytics by themselves: what a node computes, and runs on a master."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.records.record import TrainRecord
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import evener_here
from support.yolo_cases import Case, LocalCase, draw_classes, draw_detection, needs_ultralytics, train, train_locally
from support.yolo_commands import ENVIRONMENT, read_by_plain_yolo, yolo

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "batch": 4,
    "nbs": 4,
    "imgsz": 64,
    "close_mosaic": 1,
    "warmup_epochs": 1,
    "seed": 1,
}


@needs_ultralytics
@pytest.mark.parametrize(
    ("task", "model", "optimizer"),
    [
        ("detect", "yolov8n.yaml", "SGD"),
        ("detect", "yolo26n.yaml", "MuSGD"),
        ("classify", "yolov8n-cls.yaml", "AdamW"),
    ],
)
def test_local_training_equals_the_ultralytics_loop(tmp_path: Path, task: str, model: str, optimizer: str) -> None:
    data = draw_classes(tmp_path / "data") if task == "classify" else draw_detection(tmp_path / "data")
    asked = {**SETTINGS, "data": str(data), "optimizer": optimizer, "val": False}
    loop = train(Case(model=model, settings=asked, out=str(tmp_path / "loop"), dtype="float32"), 1)[0]
    node = train_locally(LocalCase(model=model, task=task, settings=asked, out=str(tmp_path / "node.pt")))
    for name, value in loop["weights"].items():
        assert torch.allclose(node[f"model.{name}"].double(), value.double(), rtol=1e-5, atol=1e-6), name
    for name, value in loop["ema"].items():
        if value.is_floating_point():
            assert torch.allclose(node[f"average.{name}"].double(), value.double(), rtol=1e-5, atol=1e-6), name


@needs_ultralytics
def test_nodes_merge_every_epoch_and_plain_yolo_reads_the_result(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data", count=12)
    words = f"train yolov8n.yaml --data {data} --epochs 2 --batch-size 4 --agreement average --local-nodes 1,0.5"
    options = f"imgsz=64 project={tmp_path} name=run plots=False"
    done = yolo(*words.split(), *(w for o in options.split() for w in ("--option", o)), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = msgspec.json.decode((tmp_path / "run" / "record.json").read_bytes(), type=TrainRecord)
    assert json.loads(done.stdout.splitlines()[-1])["agreement"] == "average"
    assert [step.samples for step in record.steps] == [12, 12]
    assert len(record.validations) == 2
    assert {file.name for file in (tmp_path / "run").iterdir()} >= {"args.yaml", "record.json", "report.html"}
    lines = (tmp_path / "run" / "results.csv").read_text().splitlines()
    assert "metrics/mAP50-95(B)" in lines[0]
    assert len(lines) == 2
    read_by_plain_yolo(tmp_path / "run" / "weights" / "last.pt", tmp_path)


@needs_ultralytics
def test_a_killed_node_is_named_and_the_others_complete_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (ENVIRONMENT | {"YOLO_CONFIG_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    data, patience = draw_detection(tmp_path / "data", count=16), 3
    options = f"imgsz=64 project={tmp_path} name=run plots=False"
    words = ["yolov8n.yaml", "--data", str(data), "--epochs", "12", "--batch-size", "4", "--agreement", "average"]
    with cluster("--patience", str(patience)) as ps:
        for name in ("killed", "steady"):
            ps.join(name)
        ps.wait_for_nodes()
        training = ps.start_training(*words, *(word for one in options.split() for word in ("--option", one)))
        wait_until(lambda: ps.version() > 1, "that both have merged")
        ps.nodes["killed"].kill()
        begin = time.monotonic()
        wait_until(lambda: ps.state("killed") == "excluded", "that the master gives it up")
        assert time.monotonic() - begin < patience + 5
        assert training.wait(120) == 0, ps.said("train.out")
        said = (ps.folder / "train.out").read_text()
        ps.down()
    assert "killed" in said
    record = msgspec.json.decode((tmp_path / "run" / "record.json").read_bytes(), type=TrainRecord)
    assert sum(step.samples for step in record.steps) == 12 * 16
    assert any(event.kind == "excluded" and "killed" in event.message for event in record.events)
    assert (tmp_path / "run" / "weights" / "last.pt").is_file()


@needs_ultralytics
def test_frozen_node_sits_out_returns_and_trains_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRONMENT | {"YOLO_CONFIG_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    data, patience = draw_detection(tmp_path / "data", count=16), 3
    options = f"imgsz=64 project={tmp_path} name=run plots=False val=False"
    words = ["yolov8n.yaml", "--data", str(data), "--epochs", "500", "--batch-size", "4", "--agreement", "average"]
    with cluster("--patience", str(patience)) as ps:
        for name in ("still", "steady"):
            ps.join(name)
        ps.wait_for_nodes()
        training = ps.start_training(*words, *(word for one in options.split() for word in ("--option", one)))
        wait_until(lambda: ps.version() > 1, "that both have merged")
        ps.nodes["still"].send_signal(signal.SIGSTOP)
        wait_until(lambda: ps.state("still") == "excluded", "that the master gives it up")
        ps.nodes["still"].send_signal(signal.SIGCONT)
        wait_until(lambda: ps.state("still") == "present", "that it is taken back")
        before = samples_of(ps, "still")
        wait_until(lambda: samples_of(ps, "still") > before, "that it trains again")
        training.send_signal(signal.SIGINT)
        assert training.wait(60) == 130, ps.said("train.out")
        ps.down()
    record = msgspec.json.decode((tmp_path / "run" / "record.json").read_bytes(), type=TrainRecord)
    kinds = [event.kind for event in record.events if event.nodes == ("still",) or "still" in event.message]
    assert kinds.index("excluded") < kinds.index("back")
    assert all(node.contributions > 1 for node in record.nodes)


def samples_of(ps: Cluster, name: str) -> int:
    """Samples that a node has computed in this run."""
    return next(node.samples for node in ps.ask().nodes if node.name == name)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("freeze=10", "freeze=10 does not go with --agreement: nodes are sent what is trained"),
        ("nbs=64", "nbs=64 does not go with --agreement: every batch of a node is a step"),
        ("batch=0", "batch must be a number of images of one step"),
    ],
)
def test_options_incompatible_with_merges_are_refused(tmp_path: Path, option: str, sentence: str) -> None:
    done = evener_here("train", "yolov8n.yaml", "--agreement", "average", "--option", option, cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith(f"evener: {sentence}")) == (2, True), done.stderr
