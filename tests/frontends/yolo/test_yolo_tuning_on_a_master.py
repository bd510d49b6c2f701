"""Searches for settings of a model of Ultralytics on the nodes of a master."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.command_cluster import Cluster, cluster, wait_until
from support.commands import command
from support.yolo_cases import draw_classes, needs_ultralytics
from support.yolo_commands import ENVIRONMENT
from support.yolo_scripts import DOUBLE, SMALL, WEIGHTS, run_script, weights

pytest.importorskip("optuna", reason="needs the extra tune")
pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = ("imgsz=32", "plots=False", "workers=0", "optimizer=SGD", "warmup_epochs=0")
OPTIONS = [word for setting in SETTINGS for word in ("--option", setting)]
VARIED = ("--vary", "lr0=1e-2..1:log", "--vary", "momentum=0.6..0.95")


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    """A master with a fast and a slow node, which compute in double precision."""
    for name, value in {**ENVIRONMENT, "PYTHONPATH": DOUBLE, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    draw_classes(tmp_path / "classes", count=48)
    with cluster("--patience", "10") as one:
        monkeypatch.setenv("YOLO_CONFIG_DIR", str(one.folder))
        one.join("fast")
        one.join("slow", "--speed", "0.4")
        one.wait_for_nodes()
        yield one
        one.down()


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    typed = ("tune", "yolov8n-cls.yaml", "--data", str(folder / "classes"), *VARIED, *OPTIONS, *words)
    return subprocess.Popen(command(*typed), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def search(folder: Path, *words: str) -> str:
    """Search to the end; return what was shown."""
    begun = begin(folder, *words)
    shown, _ = begun.communicate(timeout=600)
    assert begun.returncode == 0, shown
    return shown


def trials(folder: Path) -> list[Any]:
    study = json.loads((folder / "study.json").read_text())
    return [(one["number"], one["outcome"], one["values"], one["scores"]) for one in study["trials"]]


def require_same_trials(found: Path, wanted: Path) -> None:
    for (*trial, scores), (*alone, once) in zip(trials(found), trials(wanted), strict=True):
        assert trial == alone
        assert scores == pytest.approx(once, abs=1e-9)


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "script.py").touch()  # that defines no model of its own
    best = json.loads((folder / "study.json").read_text())["best"]
    return weights(folder / "trials" / f"{best:04d}" / "weights" / "last.pt")


def test_search_on_a_master_finds_what_one_node_of_this_machine_finds(ps: Cluster, tmp_path: Path) -> None:
    common = ("--trials", "9", "--ahead", "1", "--epochs", "9", "--batch-size", "2")
    search(tmp_path, *common, "--local-nodes", "1", "--output", "alone")
    shown = search(tmp_path, *common, "--home", str(ps.home), "--output", "found")
    assert "Traceback" not in shown
    require_same_trials(tmp_path / "found", tmp_path / "alone")
    assert {outcome for _, outcome, _, _ in trials(tmp_path / "found")} == {"complete", "pruned"}
    study = json.loads((tmp_path / "found" / "study.json").read_text())
    assert {name for one in study["trials"] for name in one["nodes"]} == {"fast", "slow"}
    lines = [json.loads(line) for line in (tmp_path / "found" / "tune_results.ndjson").read_text().splitlines()]
    for line in lines:
        assert line["fitness"] == pytest.approx(line["datasets"]["data"]["fitness"], abs=1e-5)
    assert {one.name for one in (tmp_path / "found" / "weights").iterdir()} == {"best.pt", "last.pt"}
    assert any(len(one["nodes"]) > 1 for one in study["trials"])  # which have moved, or were shared
    best = best_weights(tmp_path / "found")
    for name, value in best_weights(tmp_path / "alone").items():
        if value.is_floating_point():
            assert (best[name] - value).abs().max() <= WEIGHTS * value.abs().max().clamp(min=SMALL), name
    assert not ps.ask().runs


LONG = ("--trials", "4", "--ahead", "1", "--epochs", "12", "--batch-size", "4", "--prune", "none")


@pytest.mark.parametrize("dies", ["a node", "the master", "the search"])
def test_killed_process_loses_and_repeats_no_trial(dies: str, ps: Cluster, tmp_path: Path) -> None:
    search(tmp_path, *LONG, "--local-nodes", "1", "--output", "alone")
    words = (*LONG, "--home", str(ps.home), "--output", "found")
    begun = begin(tmp_path, *words)
    study = tmp_path / "found" / "study.json"
    wait_until(lambda: study.exists() and any(scores for *_, scores in trials(study.parent)), "that an epoch ends")
    if dies == "a node":
        working = next(run.nodes[0] for run in ps.ask().runs if run.nodes)
        ps.nodes[working].kill()
    elif dies == "the master":
        ps.master.kill()
        ps.master.wait()
        ps.up()
    else:
        begun.kill()
        begun.communicate()
        begun = begin(tmp_path, *words, "--resume")
    shown, _ = begun.communicate(timeout=600)
    assert begun.returncode == 0, shown
    assert "Traceback" not in shown
    require_same_trials(tmp_path / "found", tmp_path / "alone")
    assert not ps.ask().runs


SCRIPT = """
from pathlib import Path

from evener.yolo import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n-cls.yaml")
    settings = dict(data="classes", epochs=2, imgsz=32, plots=False, workers=0, seed=3, batch=4)
    settings["project"] = str(Path("found").resolve())
    space = {{"lr0": (1e-3, 1e-1), "momentum": (0.6, 0.95, 0.3), "cos_lr": ("True", "False")}}
    common = dict(home={home!r}, prune="none", space=space, ship_data=True, **settings)
    model.tune(iterations=3, **common)
    assert [one.outcome for one in model.study.trials] == ["complete"] * 3, model.study
    assert {{name for one in model.study.trials for name in one.nodes}} == {{"fast", "slow"}}
    model.tune(iterations=4, resume=True, **common)
    assert [one.outcome for one in model.study.trials] == ["complete"] * 4, model.study
"""


def test_tune_of_python_searches_on_a_master(ps: Cluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(home=str(ps.home)))
    done = run_script(["script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "found" / "tune" / "tune_results.ndjson").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "words",
    [
        ("--agreement", "sync"),
        ("--option", "save_period=1"),
        ("--vary", "save_period=1,2"),
        ("--option", "pretrained=other.pt"),
        ("--memory", "1GB"),
        ("--thin",),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_does_not_go_with_a_search_on_a_master_is_refused(
    ps: Cluster, tmp_path: Path, words: tuple[str, ...]
) -> None:
    begun = begin(tmp_path, "--home", str(ps.home), "--trials", "1", "--epochs", "1", "--output", "none", *words)
    shown, _ = begun.communicate(timeout=100)
    assert begun.returncode == 2, shown
    assert "Traceback" not in shown
    assert not list((tmp_path / "none").glob("[!.]*"))  # the corrected command can use the folder
    assert not ps.ask().runs
