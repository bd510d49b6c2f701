"""Searches for settings of a model of Ultralytics: the command, Python, what a moved trial comes to, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from evener.launch.nodes import NodeSpec, parse_local_nodes
from evener.launch.processes import LocalProcesses
from evener.records.errors import EvenerError, Interrupted, InvalidInput
from evener.records.events import decode_events
from evener.records.record import Epoch
from support.commands import command
from support.yolo_cases import draw_classes, draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, yolo

pytest.importorskip("optuna", reason="needs the extra tune")
pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(900)]

CLASSIFIER = ("imgsz=32", "plots=False", "workers=0", "optimizer=SGD", "dropout=0.0")
VARIED = ("--vary", "lr0=1e-3..1e-1:log", "--vary", "momentum=0.6..0.95")
EPOCHS = 4


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--option", setting)]


def search(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    typed = ("tune", "yolov8n-cls.yaml", "--data", str(folder / "classes"), *VARIED, *options(*CLASSIFIER), *words)
    return yolo(*typed, cwd=folder)


def record_of(folder: Path) -> Any:
    return json.loads((folder / "study.json").read_text())


def outcomes(folder: Path) -> list[Any]:
    return [(one["number"], one["outcome"], one["values"], one["scores"]) for one in record_of(folder)["trials"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw_classes(tmp_path / "classes")
    return tmp_path


def test_search_on_uneven_nodes_finds_what_one_node_finds(folder: Path) -> None:
    common = ("--trials", "7", "--ahead", "2", "--epochs", str(EPOCHS), "--batch-size", "4")
    for name, nodes in (("one", "1"), ("three", "1,0.5,0.25")):
        result = search(folder, *common, "--local-nodes", nodes, "--output", name)
        assert result.returncode == 0, result.stderr
    one, three = outcomes(folder / "one"), outcomes(folder / "three")
    assert {outcome for _, outcome, _, _ in one} == {"complete", "pruned"}
    assert [trial[:3] for trial in three] == [trial[:3] for trial in one]
    for (*_, alone), (*_, shared) in zip(one, three, strict=True):
        assert shared == pytest.approx(alone, abs=1e-6)
    record = record_of(folder / "three")
    assert record["best"] == record_of(folder / "one")["best"]
    assert any(len(trial["nodes"]) > 1 for trial in record["trials"])
    assert record["trials"][0]["values"] == {"lr0": "0.01", "momentum": "0.937"}  # as they are without a search


def test_search_leaves_the_files_of_ultralytics(folder: Path) -> None:
    result = search(folder, "--trials", "3", "--epochs", "2", "--prune", "none", "--local-nodes", "1,0.5")
    assert result.returncode == 0, result.stderr
    (found,) = folder.glob("runs/classify/tune")
    lines = [json.loads(line) for line in (found / "tune_results.ndjson").read_text().splitlines()]
    record = record_of(found)
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for line, trial in zip(lines, record["trials"], strict=True):
        assert line["fitness"] == pytest.approx(trial["score"], abs=1e-5)
        assert line["fitness"] == pytest.approx(line["datasets"]["data"]["fitness"], abs=1e-5)
        assert {"metrics/accuracy_top1", "metrics/accuracy_top5"} <= set(line["datasets"]["data"])
    best = yaml.safe_load((found / "best_hyperparameters.yaml").read_text())
    assert best == lines[record["best"]]["hyperparameters"]
    assert {one.name for one in (found / "weights").iterdir()} == {"best.pt", "last.pt"}
    assert [one.parents[1].name for one in found.glob("trials/*/weights/best.pt")] == [f"{record['best']:04d}"]
    assert (found / "tune_fitness.png").stat().st_size > 0
    assert (found / "tune_scatter_plots.png").stat().st_size > 0
    assert not list(found.glob("trials/*/checkpoints"))
    again = search(folder, "--trials", "1", "--epochs", "1", "--local-nodes", "1")
    assert again.returncode == 0, again.stderr
    assert len(list(folder.glob("runs/classify/tune*"))) == 2  # a folder of its own, as with Ultralytics


def test_without_varied_settings_the_space_is_that_of_ultralytics(folder: Path) -> None:
    from ultralytics.engine.tuner import Tuner

    draw_detection(folder / "boxes")
    typed = ("--data", str(folder / "boxes" / "data.yaml"), "--trials", "2", "--epochs", "1", "--output", "found")
    result = yolo("tune", "yolov8n.yaml", *typed, *options("imgsz=32", "plots=False", "workers=0"), cwd=folder)
    assert result.returncode == 0, result.stderr
    space = Tuner({"mode": "train"}, model=object()).space
    drawn = record_of(folder / "found")["trials"][1]["values"]
    assert list(drawn) == list(space)
    assert all(space[name][0] <= float(value) <= space[name][1] for name, value in drawn.items())


def test_killed_search_resumes_without_repeating_a_trial(folder: Path) -> None:
    words = ("--trials", "5", "--epochs", "6", "--batch-size", "4", "--prune", "none", "--local-nodes", "1,0.5")
    typed = ("tune", "yolov8n-cls.yaml", "--data", str(folder / "classes"), *VARIED, *options(*CLASSIFIER), *words)
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder)}
    begun = subprocess.Popen(
        command(*typed, "--output", "killed"), cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )
    journal = folder / "killed" / "journal.log"
    until = time.monotonic() + 300
    while not (journal.exists() and '"ended"' in journal.read_text()):
        assert begun.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    result = search(folder, *words, "--output", "killed", "--resume")
    assert result.returncode == 0, result.stderr
    assert search(folder, *words, "--output", "whole").returncode == 0
    for (*resumed, again), (*whole, once) in zip(outcomes(folder / "killed"), outcomes(folder / "whole"), strict=True):
        assert resumed == whole
        assert again == pytest.approx(once, abs=1e-6)
    lines = (folder / "killed" / "tune_results.ndjson").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4, 5]


SCRIPT = """
from evener.yolo import YOLO

model = YOLO("yolov8n-cls.yaml")
model.add_callback("on_train_start", lambda trainer: open("called", "a").write("x"))
settings = dict(data="classes", epochs=2, imgsz=32, plots=False, workers=0, seed=3, project="found")
space = {"lr0": (1e-3, 1e-1), "momentum": (0.6, 0.95, 0.3), "cos_lr": ("True", "False")}
assert model.tune(iterations=3, nodes=[1, 0.5], prune="none", space=space, **settings) is None
assert [one.outcome for one in model.study.trials] == ["complete"] * 3
assert model.study.seed == 3
model.tune(iterations=4, nodes="1,0.5", prune="none", space=space, resume=True, **settings)
assert [one.outcome for one in model.study.trials] == ["complete"] * 4
"""


def test_tune_of_python_searches_on_nodes_and_resumes(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = (folder / "found" / "tune" / "tune_results.ndjson").read_text().splitlines()
    assert len(lines) == 4
    assert {str(json.loads(line)["hyperparameters"]["cos_lr"]) for line in lines} <= {"True", "False"}
    assert not (folder / "called").exists()  # trials have no callbacks of the user, as with Ultralytics


class Attempts:
    """Attempts of one trial on nodes, without a search."""

    def __init__(self, processes: LocalProcesses, settings: Sequence[str], folder: Path) -> None:
        self.processes, self.settings, self.folder = processes, settings, folder
        self.losses: dict[int, float | None] = {}
        (folder / "checkpoints").mkdir(parents=True)

    def run(
        self, nodes: Sequence[NodeSpec], *, until: int | None = None, shares: str = "measured"
    ) -> list[EvenerError | None]:
        """Go on to the end, or until the end of an epoch, from 0; the errors of the ranks."""
        from evener.frontends.yolo.overrides import YoloConfig
        from evener.frontends.yolo.tuning import TrialConfig, trial_rank
        from evener.search.torch_trial import TorchTrial

        overrides = ("train", *self.settings, f"save_dir={self.folder}", "exist_ok=True")
        training = YoloConfig(overrides=overrides, shares=shares, elastic=False)
        config = TrialConfig(training, self.folder / "checkpoints" / "trainer.state", 30.0)
        trial = TorchTrial(self.processes, nodes, config, trial_rank)
        while not all(one.has_ended and one.is_drained for one in trial.processes):
            for _, data in self.processes.receive(0.2):
                for event in decode_events(data):
                    if isinstance(event, Epoch):
                        self.losses[event.epoch] = event.loss
                        trial.answer(event, event.epoch == until)
        errors = [None if one.has_finished else trial.error() for one in trial.processes]
        trial.close()
        return errors

    def weights(self) -> dict[str, torch.Tensor]:
        last = torch.load(self.folder / "weights" / "last.pt", weights_only=False)
        return dict((last["ema"] or last["model"]).state_dict())

    def lines(self) -> list[str]:
        return [line.split(",")[0] for line in (self.folder / "results.csv").read_text().splitlines()]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalProcesses]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    with LocalProcesses(()) as some:
        yield some


@pytest.mark.parametrize("accumulated", ["nbs=8", "nbs=24"], ids=["every batch a step", "three batches a step"])
def test_moved_trial_comes_to_the_weights_of_an_uninterrupted_one(
    processes: LocalProcesses, tmp_path: Path, accumulated: str
) -> None:
    data = draw_detection(tmp_path / "data", count=20)
    settings = (
        *("model=yolov8n.yaml", f"data={data}", f"epochs={EPOCHS}", "batch=8", "imgsz=32", accumulated, "workers=0"),
        *("plots=False", "optimizer=SGD", "close_mosaic=1", "warmup_epochs=1.0"),
    )
    fast, slow = parse_local_nodes("1,0.5")
    whole, moved, shared = (Attempts(processes, settings, tmp_path / name) for name in ("whole", "moved", "shared"))
    assert whole.run([fast]) == [None]
    for epoch in range(EPOCHS - 1):
        (error,) = moved.run([fast if epoch % 2 else slow], until=epoch)
        assert isinstance(error, Interrupted)
    assert moved.run([fast]) == [None]
    assert isinstance(shared.run([slow], until=0)[0], Interrupted)
    assert all(isinstance(one, Interrupted) for one in shared.run([slow, fast], until=1, shares="3,5"))
    assert shared.run([fast]) == [None]
    for attempts, tolerance in ((moved, 0.0), (shared, 2e-5)):
        assert attempts.losses == pytest.approx(whole.losses, rel=tolerance or 1e-12)
        assert attempts.lines() == whole.lines()
        for name, tensor in whole.weights().items():
            torch.testing.assert_close(attempts.weights()[name], tensor, rtol=0.0, atol=50 * tolerance)


@pytest.mark.parametrize(
    "words",
    [
        ("--thin",),
        ("--metric", "loss"),
        ("--precision", "bf16"),
        ("--agreement", "sync"),
        ("--batch-size", "8", "--option", "batch=-1"),
        ("--option", "resume=True"),
        ("--vary", "speed=1..2"),
        ("--option", "compile=True"),
        ("--option", "nonsense=1"),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_does_not_go_with_a_search_is_refused_before_a_trial(folder: Path, words: tuple[str, ...]) -> None:
    result = search(folder, "--trials", "1", "--epochs", "1", "--local-nodes", "1", "--output", "none", *words)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "none" / "trials").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"space": {"lr0": (0.1, 0.01)}},
        {"space": {"lr0": 0.1}},
        {"space": "lr0"},
        {"batch": -1},
        {"data": ["a.yaml", "b.yaml"]},
        {"use_ray": True},
        {"space": {"nonsense": (0, 1)}},
    ],
    ids=str,
)
def test_tune_of_python_refuses_by_a_class_of_evener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    from evener.yolo import YOLO

    monkeypatch.chdir(tmp_path)
    model = YOLO("yolov8n-cls.yaml")
    with pytest.raises(InvalidInput):
        model.tune(**{"data": "classes", "epochs": 1, "iterations": 1, "nodes": "1,0.5", **settings})
    assert model.study is None
