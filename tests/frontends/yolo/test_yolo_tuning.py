"""Searches for settings of a model of Ultralytics: the command, Python, what a moved trial comes to, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evener.launch.nodes import parse_local_nodes
from evener.launch.processes import LocalProcesses
from evener.records.errors import Interrupted
from support.commands import command
from support.yolo_cases import SETTINGS, draw_classes, draw_detection, needs_ultralytics, off
from support.yolo_commands import ENVIRONMENT, yolo
from support.yolo_trials import Attempts

pytest.importorskip("optuna", reason="needs the extra tune")
pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(900)]

CLASSIFIER = ("imgsz=32", "plots=False", "workers=0", "optimizer=SGD", "warmup_epochs=0")
VARIED = ("--vary", "lr0=1e-3..1:log", "--vary", "momentum=0.6..0.95")


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--option", setting)]


def search(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    typed = ("tune", "yolov8n-cls.yaml", "--data", str(folder / "classes"), *VARIED, *options(*CLASSIFIER), *words)
    return yolo(*typed, cwd=folder)


def run_python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder), **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    result = run_python(folder, "script.py")
    assert result.returncode == 0, result.stderr[-2000:]
    return result


def record_of(folder: Path) -> Any:
    return json.loads((folder / "study.json").read_text())


def outcomes(folder: Path) -> list[Any]:
    return [(one["number"], one["outcome"], one["values"], one["scores"]) for one in record_of(folder)["trials"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw_classes(tmp_path / "classes", count=48)
    return tmp_path


def test_search_on_uneven_nodes_finds_what_one_node_finds(folder: Path) -> None:
    common = ("--trials", "9", "--ahead", "1", "--epochs", "9", "--batch-size", "4")
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


def test_search_leaves_the_files_of_ultralytics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it Ultralytics has another folder of runs
    (folder / "home").mkdir()
    (folder / "script.py").write_text("import ultralytics\nultralytics.settings.update(runs_dir='runs')\n")
    assert run_python(folder, "script.py", YOLO_CONFIG_DIR=str(folder / "home")).returncode == 0
    common = ("--epochs", "2", "--prune", "none")
    result = search(folder, *common, "--trials", "3", "--local-nodes", "1,0.5")
    assert result.returncode == 0, result.stderr
    found = folder / "runs" / "classify" / "tune"
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
    again = search(folder, *common, "--trials", "1", "--local-nodes", "1", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["trials"] == 1  # and nothing else is there
    assert len(list(found.parent.glob("tune*"))) == 2  # a folder of its own, as with Ultralytics


SPACE = """
import json
import torchvision_operators
from ultralytics.engine.tuner import Tuner
print(json.dumps(Tuner({"mode": "train"}, model=object()).space))
"""


def test_without_varied_settings_the_space_is_that_of_ultralytics(folder: Path) -> None:
    draw_detection(folder / "boxes")
    typed = ("--data", str(folder / "boxes" / "data.yaml"), "--trials", "2", "--epochs", "1", "--output", "found")
    result = yolo("tune", "yolov8n.yaml", *typed, *options("imgsz=32", "plots=False", "workers=0"), cwd=folder)
    assert result.returncode == 0, result.stderr
    space = json.loads(run_script(folder, SPACE).stdout.splitlines()[-1])
    assert "--option optimizer=AdamW" in result.stdout  # "auto" would ignore the learning rates
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
from pathlib import Path

from evener.yolo import YOLO

model = YOLO("yolov8n-cls.yaml")
model.add_callback("on_train_start", lambda trainer: open("called", "a").write("x"))
settings = dict(data="classes", epochs=2, imgsz=32, plots=False, workers=0, seed=3)
settings["project"] = str(Path("found").resolve())
space = {"lr0": (1e-3, 1e-1), "momentum": (0.6, 0.95, 0.3), "cos_lr": ("True", "False")}
assert model.tune(iterations=3, nodes=[1, 0.5], prune="none", space=space, **settings) is None
assert [one.outcome for one in model.study.trials] == ["complete"] * 3
assert model.study.seed == 3
model.tune(iterations=4, nodes="1,0.5", prune="none", space=space, resume=True, **settings)
assert [one.outcome for one in model.study.trials] == ["complete"] * 4
"""


def test_tune_of_python_searches_on_nodes_and_resumes(folder: Path) -> None:
    run_script(folder, SCRIPT)
    lines = (folder / "found" / "tune" / "tune_results.ndjson").read_text().splitlines()
    assert len(lines) == 4
    assert {str(json.loads(line)["hyperparameters"]["cos_lr"]) for line in lines} <= {"True", "False"}
    assert not (folder / "called").exists()  # trials have no callbacks of the user, as with Ultralytics


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalProcesses]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    with LocalProcesses(()) as some:
        yield some


@pytest.mark.parametrize(
    ("count", "accumulated"), [(8, "nbs=8"), (16, "nbs=24")], ids=["every batch a step", "steps across epochs"]
)
def test_moved_trial_comes_to_the_weights_of_an_uninterrupted_one(
    processes: LocalProcesses, tmp_path: Path, count: int, accumulated: str
) -> None:
    data = draw_detection(tmp_path / "data", count=count)
    chosen = {**SETTINGS, "model": "yolov8n.yaml", "data": data, "workers": 0, "plots": False}
    settings = [*(f"{name}={value}" for name, value in chosen.items()), accumulated]
    fast, slow, idle = parse_local_nodes("1,0.5,0.5")
    whole, moved, shared = (Attempts(processes, settings, tmp_path / name) for name in ("whole", "moved", "shared"))
    assert whole.run([fast]) == [None]
    for epoch in range(SETTINGS["epochs"] - 1):
        (error,) = moved.run([fast if epoch % 2 else slow], until=epoch)
        assert isinstance(error, Interrupted)
    assert moved.run([fast]) == [None]
    assert isinstance(shared.run([slow], until=0)[0], Interrupted)
    assert all(isinstance(one, Interrupted) for one in shared.run([slow, idle, fast], until=1, shares=[3, 0, 5]))
    assert shared.run([fast]) == [None]
    wanted = whole.weights()
    for attempts, tolerance in ((moved, 0.0), (shared, 1e-9)):
        assert attempts.losses == pytest.approx(whole.losses, rel=max(tolerance, 1e-12))
        assert attempts.lines() == whole.lines()
        found = attempts.weights()
        assert found.keys() == wanted.keys()
        assert off(found, wanted) <= tolerance


@pytest.mark.parametrize("accumulated", ["nbs=4", "nbs=12"], ids=["every batch a step", "three batches a step"])
def test_trial_that_is_stopped_within_an_epoch_goes_on_from_its_batch(
    processes: LocalProcesses, tmp_path: Path, accumulated: str
) -> None:
    data = draw_detection(tmp_path / "data", count=40)
    chosen = {**SETTINGS, "model": "yolov8n.yaml", "data": data, "workers": 0, "plots": False, "epochs": 2, "batch": 4}
    settings = [*(f"{name}={value}" for name, value in chosen.items()), accumulated, "lr0=1e-4"]
    fast, slow = parse_local_nodes("1,0.5")
    whole, moved = (Attempts(processes, settings, tmp_path / name) for name in ("whole", "moved"))
    assert whole.run([fast]) == [None]
    assert isinstance(moved.run([slow], step=2)[0], Interrupted)
    assert moved.losses == {}
    stopped_after = moved.batch()
    assert 2 < stopped_after < 10
    assert isinstance(moved.run([fast], stops_early=True)[0], Interrupted)  # in batches that it skips
    assert moved.batch() == stopped_after
    assert all(isinstance(error, Interrupted) for error in moved.run([slow, fast], step=13, shares=[1, 3]))
    assert 13 < moved.batch() < 20
    assert moved.run([fast]) == [None]
    assert moved.lines() == whole.lines()
    assert off(moved.weights(), whole.weights()) <= 1e-9


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
        ("--vary", "epochs=1..3"),
        ("--vary", "batch=8,16,-1"),
        ("--option", "val=False"),
        ("--vary", "model=yolov8n-cls.yaml,yolov8s-cls.yaml"),
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


REFUSED = """
from evener.records.errors import InvalidInput
from evener.yolo import YOLO

model = YOLO("yolov8n-cls.yaml")
cases = [
    {"space": {"lr0": (0.1, 0.01)}},
    {"space": {"lr0": 0.1}},
    {"space": "lr0"},
    {"space": {"nonsense": (0, 1)}},
    {"batch": -1},
    {"nodes": None, "devices": "cpu", "prune": "none"},
    {"nodes": None, "memory": "1GB"},
    {"nodes": "1,0.5", "device": "cpu"},
    {"val": False},
    {"data": ["a.yaml", "b.yaml"]},
    {"use_ray": True},
    {"nonsense": 1},
]
for case in cases:
    try:
        model.tune(**{"data": "classes", "epochs": 1, "iterations": 1, "nodes": "1,0.5", **case})
    except InvalidInput:
        continue
    raise SystemExit(f"not refused: {case}")
assert model.study is None
print("all refused")
"""


def test_tune_of_python_refuses_by_a_class_of_evener(folder: Path) -> None:
    result = run_script(folder, REFUSED)
    assert result.stdout.splitlines()[-1] == "all refused"
    assert not list(folder.rglob("tune_results.ndjson"))


def test_search_whose_trials_all_fail_says_so(folder: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(folder / "classes" / split)
    result = search(folder, "--trials", "2", "--epochs", "1", "--local-nodes", "1", "--output", "none")
    assert result.returncode > 0, result.stdout
    assert "Traceback" not in result.stderr
    assert [trial["outcome"] for trial in record_of(folder / "none")["trials"]] == ["failed", "failed"]


def test_tune_is_not_for_ranks_of_a_launcher(folder: Path) -> None:
    (folder / "script.py").write_text("from evener.yolo import YOLO\nYOLO('yolov8n-cls.yaml').tune(data='classes')\n")
    for words in (("-m", "evener", "run", "--local-nodes", "1,0.5", "script.py"), ("script.py",)):
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if words == ("script.py",) else {}
        result = run_python(folder, *words, **ranks)
        assert result.returncode != 0
        assert "InvalidInput" in result.stderr or result.returncode == 2
