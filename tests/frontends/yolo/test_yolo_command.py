"""The commands that train a model of Ultralytics: what they refuse, what they write, and that plain YOLO reads it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evener.records.errors import MissingExtra
from evener.records.plan import Plan
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.records.version import pip_install
from support.commands import command, evener, evener_here, last_json
from support.yolo_cases import draw_classes, draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, TESTS, read_by_plain_yolo, yolo

PAGE = TESTS.parent / "docs" / "yolo.md"


def test_unsupported_requests_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for words, sentence in (
        ("yolo detekt train model=yolov8n.yaml", "evener: 'detekt' is neither train, nor one of detect, segment"),
        ("yolo train model=yolov8n.yaml batch=-2", "evener: batch must be a number of images of one step"),
        ("yolo train model=yolov8n.yaml device=0", "evener: device=0 does not go with Evener: nodes are named by"),
        ("train yolov8n.yaml --strategy filter", "evener: --strategy does not go with a model of Ultralytics"),
    ):
        done = evener_here(*words.split(" "), cwd=tmp_path)
        assert (done.returncode, done.stderr.startswith(sentence)) == (2, True), done.stderr


@needs_ultralytics
@pytest.mark.slow
def test_last_batch_of_one_small_image_is_refused_before_training(tmp_path: Path) -> None:
    data = draw_classes(tmp_path / "data", 9)
    words = ("yolo", "classify", "train", "model=yolov8n-cls.yaml", f"data={data}", "imgsz=32", "batch=8", "workers=0")
    done = yolo(*words, "--local-nodes", "1,1", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "BatchNorm" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_ultralytics_error_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = evener_here("yolo", "train", "model=yolov8n.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"evener: YOLO needs Ultralytics, which is not installed: {pip_install('ultralytics')}\n"


def test_yolo_from_python_without_ultralytics_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("evener.yolo", "evener.frontends.yolo.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtra, match=re.escape(pip_install("ultralytics"))):
        importlib.import_module("evener.yolo")


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "yolo train model=yolov8n.yaml data=data/data.yaml",
        "train yolov8n.yaml --data data/data.yaml --local-nodes 1,1",
        "train yolov8n.yaml --data data/data.yaml --agreement average --local-nodes 1,1",
    ],
)
def test_broken_torchvision_is_reported_at_once(words: str, tmp_path: Path) -> None:
    broken = tmp_path / "site" / "torchvision"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    path = os.pathsep.join([str(broken.parent), *sys.path])
    draw_detection(tmp_path / "data")
    began = time.monotonic()
    done = evener(*words.split(), cwd=tmp_path, PYTHONPATH=path, YOLO_OFFLINE="true", YOLO_CONFIG_DIR=str(tmp_path))
    assert done.returncode == MissingExtra.exit_code, done.stderr
    assert "torchvision::nms" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 20  # it is imported before anything that takes long


@needs_ultralytics
@pytest.mark.slow
def test_detector_trains_on_uneven_nodes_and_loads_in_plain_yolo(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"model=yolov8n.yaml data={data} epochs=2 imgsz=64 batch=8 project={tmp_path} name=run plots=False"
    done = yolo("yolo", "detect", "train", *words.split(" "), "--local-nodes", "1,0.5", "--json", cwd=tmp_path)
    assert last_json(done)["nodes"][0]["name"] == "node-0"
    assert done.stderr.count("AGPL-3.0, and so is") == 1
    assert {file.name for file in (tmp_path / "run").iterdir()} >= {
        "args.yaml", "plan.json", "record.json", "report.html", "results.csv", "weights",
    }  # fmt: skip
    assert len((tmp_path / "run" / "results.csv").read_text().splitlines()) == 3
    plan = read_noun(tmp_path / "run" / "plan.json", Plan)
    assert plan.ring is not None
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().partition("\n")[0])["events"][0]
    assert (first[0], first[1]["file"]) == ("Phase", "yolov8n.yaml")
    for name in ("last.pt", "best.pt"):
        read_by_plain_yolo(tmp_path / "run" / "weights" / name, tmp_path)


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "kept", "others"),
    [
        (("1,0.04",), 0, 1),
        (("0.04,1",), 1, 0),
        (("1,1", "--memory", "8GB,1MB"), 0, 1),
        (("1,1", "--memory", "1MB,8GB", "--shares", "equal"), 1, 0),
    ],
    ids=["another", "first", "too small", "too small for its share"],
)
def test_node_that_is_too_slow_or_too_small_is_left_out(
    tmp_path: Path, nodes: tuple[str, ...], kept: int, others: int
) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"model=yolov8n.yaml data={data} epochs=2 imgsz=64 batch=8 project={tmp_path} name=run plots=False"
    done = yolo("yolo", "detect", "train", *words.split(" "), "--local-nodes", *nodes, "--json", cwd=tmp_path)
    assert [node["name"] for node in last_json(done)["nodes"]] == [f"node-{kept}"]
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    told = [event.message for event in record.events if event.kind == "left out"]
    assert [message.split(":")[0] for message in told] == [f"node-{others}"]
    assert [event.nodes for event in record.events if event.kind == "left out"] == [(f"node-{others}",)]
    assert len((tmp_path / "run" / "results.csv").read_text().splitlines()) == 3
    for name in ("last.pt", "best.pt"):
        read_by_plain_yolo(tmp_path / "run" / "weights" / name, tmp_path)


@needs_ultralytics
@pytest.mark.slow
def test_commands_of_the_yolo_page_work(tmp_path: Path) -> None:
    draw_detection(tmp_path / "data", count=16).rename(tmp_path / "my-data.yaml")
    lines = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    evener ")]
    typed = [shlex.split(line, comments=True)[1:] for line in lines if " resume " not in line]  # there is a test of it
    masters = ("up", "join", "--home", ".pt")  # its commands have tests of their own
    asked = [words for words in typed if not any(one in " ".join(words) for one in masters)]
    assert len(asked) == 4
    for words in asked:
        small = ["epochs=1", "imgsz=64", f"project={tmp_path / 'runs'}"]
        if words[0] == "train":
            small = ["--epochs", "1", *(word for setting in small[1:] for word in ("--option", setting))]
        done = yolo(*words, *small, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/train*/weights/best.pt"))) == 4


SLOW_RANK = """
import os, sys, time
from torch import nn

if os.environ["RANK"] == sys.argv.pop(1):
    forward = nn.Conv2d.forward

    def late(self, inputs):
        time.sleep(0.02)
        return forward(self, inputs)

    nn.Conv2d.forward = late

from evener.__main__ import main

main()
"""
"""Runs the command with a rank that is slow, by its number."""


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize(("slow", "shares", "count"), [("1", "measured", 1), ("0", "measured", 2), ("", "1,1", 2)])
def test_torchrun_ranks_except_the_first_can_be_left_out(tmp_path: Path, slow: str, shares: str, count: int) -> None:
    (tmp_path / "command.py").write_text(SLOW_RANK)
    data = draw_detection(tmp_path / "data")
    words = f"model=yolov8n.yaml data={data} epochs=1 imgsz=64 batch=8 project={tmp_path} name=run plots=False"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launcher, "command.py", slow, "yolo", "train", *words.split(" "), "--shares", shares, "--json"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(last_json(done)["nodes"]) == count
    assert ("/1 (rank 1) is left out: " in done.stderr) == (count == 1)
    assert (tmp_path / "run" / "weights" / "best.pt").is_file()
    assert not (tmp_path / "run2").exists()
    if slow == "0":
        assert "the first rank" in read_noun(tmp_path / "run" / "plan.json", Plan).advice


FILES = {
    "typo.yaml": "{path: ., trian: images, val: images, names: {0: a}}",
    "nameless.yaml": "{path: ., train: images, val: images}",
    "elsewhere.yaml": "{path: ., train: nowhere, val: nowhere, names: {0: a}}",
    "broken.yaml": "train: [a",
    "spineless.yaml": "{nc: 2, backbon: []}",
    "broken.pt": "no weights",
}
"""What users may have written, by the name of the file."""


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model=yolov8n.yaml data=no.yaml", "Ultralytics: Dataset 'no.yaml'"),
        ("model=yolov8n.yaml data=typo.yaml", "typo.yaml 'train:' key missing"),
        ("model=yolov8n.yaml data=nameless.yaml", "either 'names' or 'nc' are required"),
        ("model=yolov8n.yaml data=elsewhere.yaml", "nowhere"),
        ("model=yolov8n.yaml data=broken.yaml", "YAML syntax error in 'broken.yaml'"),
        ("model=no.yaml data=no.yaml", "Ultralytics: there is no model no.yaml: give the path of a .yaml or .pt"),
        ("model=no.pt data=no.yaml", "Ultralytics: there is no model no.pt: give the path of a .yaml or .pt"),
        ("model=spineless.yaml data=no.yaml", "Ultralytics: spineless.yaml is no model that it can read: KeyError"),
        ("model=broken.pt data=no.yaml", "Ultralytics: broken.pt is no model that it can read"),
        ("model=yolov8n.yaml epoch=3", "Ultralytics: 'epoch' is not a valid YOLO argument"),
        ("model=yolov8n.yaml lr0=high", "Ultralytics: 'lr0=high' is of invalid type str"),
        ("model=last.pt resume=True", "there is no checkpoint to go on from at last.pt"),
        ("segment model=yolov8n.yaml", "yolov8n.yaml is a model to detect, not to segment"),
    ],
)
def test_invalid_models_data_and_settings_are_reported_in_one_sentence(
    tmp_path: Path, words: str, sentence: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = yolo("yolo", "train", *words.split(" "), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@needs_ultralytics
@pytest.mark.slow
def test_unsupported_image_size_is_rounded_up(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"model=yolov8n.yaml data={data} epochs=1 imgsz=50 batch=8 project={tmp_path} name=run plots=False"
    done = yolo("yolo", "train", *words.split(" "), "--local-nodes", "1,1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "updating to [64]" in done.stdout + done.stderr


@needs_ultralytics
@pytest.mark.slow
def test_stopped_training_resumes(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    last = tmp_path / "run" / "weights" / "last.pt"
    words = f"model=yolov8n.yaml data={data} imgsz=64 batch=4 plots=False epochs=200 project={tmp_path} name=run"
    first = lines_when_stopped(tmp_path, 2, *words.split(" "), "--local-nodes", "1,1")
    again = lines_when_stopped(tmp_path, first + 1, "resume", f"model={last}", "--local-nodes", "1,0.5")
    assert first < again < 200
    epochs = [int(line.split(",")[0]) for line in (tmp_path / "run" / "results.csv").read_text().splitlines()[1:]]
    assert epochs == list(range(1, again))


def lines_when_stopped(folder: Path, lines: int, *words: str) -> int:
    """Lines of the results of a training that is stopped when there are more than so many."""
    results = folder / "run" / "results.csv"
    environment: dict[str, Any] = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder)}
    process = subprocess.Popen(
        command("yolo", "train", *words), cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    while not (results.exists() and len(results.read_text().splitlines()) > lines) and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 130, told.decode()
    assert "go on with: evener yolo detect train resume model=" in told.decode().splitlines()[-1]
    return len(results.read_text().splitlines())


@needs_ultralytics
@pytest.mark.slow
def test_stationary_nodes_train_on_their_own_images(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data", count=12)
    words = f"model=yolov8n.yaml data={data} epochs=2 imgsz=64 batch=4 project={tmp_path} name=run plots=False"
    asked = ("--local-nodes", "1,1", "--shares", "3,1", "--stationary", "--json")
    done = yolo("yolo", "detect", "train", *words.split(" "), *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [step["samples"] for step in record["steps"]] == [4] * 6
    assert [sum(step["nodes"][k]["samples"] for step in record["steps"][:3]) for k in (0, 1)] == [9, 3]
