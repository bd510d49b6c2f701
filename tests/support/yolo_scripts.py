"""Scripts for Ultralytics with one import changed: how tests run them, and what plain Ultralytics makes of them."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.yolo_cases import draw_classes, draw_detection
from support.yolo_commands import ENVIRONMENT, TESTS

SCRIPTS = TESTS / "frontends" / "yolo" / "python_scripts"
NAMES = sorted(file.stem for file in SCRIPTS.glob("*.py") if file.stem != "settings")
REPEATING = ("settings_of_the_model", "twice", "resume", "train_from_weights", "transfer_weights")
"""Scripts that train more than once, or write a file first, which the ranks of `evener run` would do at once."""
OF_EVENER = {"plan.json", "record.json", "report.html", "events.jsonl", "scalars"}
ROUNDED = 2e-5
"""Relative difference of numbers in tables, which have five or six digits."""
WEIGHTS = 1e-9
"""Largest difference of weights in double precision, relative to the largest weight of each tensor, or to `SMALL`."""
SMALL = 0.02
"""Biases begin with 0, and are a twentieth of this after the first steps."""
DOUBLE = f"{TESTS / 'support' / 'double_site'}:{ENVIRONMENT['PYTHONPATH']}"
"""The `PYTHONPATH` with which all processes compute in double precision."""


def prepare(folder: Path, name: str, *, is_plain: bool, nodes: str = "") -> Path:
    """A folder with the data, and the script; the script."""
    folder.mkdir()
    draw_detection(folder / "data")
    if name == "segment":
        draw_detection(folder / "segments", task="segment")
    if name == "classify":
        draw_classes(folder / "classes")
    (folder / "home").mkdir()
    shutil.copy(SCRIPTS / "settings.py", folder)
    text = (SCRIPTS / f"{name}.py").read_text()
    if not is_plain:
        text, count = re.subn("from ultralytics import YOLO", "from evener.yolo import YOLO", text)
        assert count == 1
    if nodes:
        text = text.replace("model.train(", f"model.train({nodes}, ")
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def run_script(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": DOUBLE,
        "YOLO_CONFIG_DIR": str(folder / "home"),
        **variables,
    }
    environment.pop("PYTEST_CURRENT_TEST", None)  # with it Ultralytics leaves trackers out
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def files(folder: Path) -> set[str]:
    """Files below the folder of the runs, but for those that Evener adds."""
    own = [one.relative_to(folder) for one in folder.rglob("*") if one.is_file()]
    return {str(one) for one in own if OF_EVENER.isdisjoint(one.parts)}


READ = """
import runpy, sys, torch
vars().update(runpy.run_path(sys.argv[3], run_name="script"))  # checkpoints name the script's own classes
one = torch.load(sys.argv[1], weights_only=False)
torch.save((one["ema"] or one["model"]).float().state_dict(), sys.argv[2])
"""


def weights(file: Path) -> dict[str, torch.Tensor]:
    """Read in a process of its own: Ultralytics changes the environment of the one that imports it."""
    out, folder = file.with_suffix(".weights"), file.parents[3]
    (script,) = (one for one in folder.glob("*.py") if one.name != "settings.py")
    done = run_script(["-c", READ, str(file), str(out), str(script)], folder)
    assert done.returncode == 0, done.stderr
    state: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    out.unlink()
    return state


def require_same_rows(found: Path, wanted: Path) -> None:
    """Assert that two tables of results have the same losses, metrics and rates."""
    own, rows = (list(csv.DictReader(file.read_text().splitlines())) for file in (found, wanted))
    assert [list(row) for row in own] == [list(row) for row in rows]
    for other, row in zip(own, rows, strict=True):
        for name in set(row) - {"time"}:
            assert float(other[name]) == pytest.approx(float(row[name]), rel=ROUNDED, abs=ROUNDED), (found, name)


def require_same_results(found: Path, wanted: Path) -> None:
    """Assert that the runs of two folders have the same files, losses, metrics and weights."""
    assert files(found / "runs") == files(wanted / "runs")
    for table in (wanted / "runs").rglob("results.csv"):
        place = table.relative_to(wanted)
        require_same_rows(found / place, table)
        for name, value in weights(table.parent / "weights" / "last.pt").items():
            if value.is_floating_point():
                other_value = weights_of(found / place.parent)[name]
                assert (other_value - value).abs().max() <= WEIGHTS * value.abs().max().clamp(min=SMALL), name


_states: dict[Path, dict[str, torch.Tensor]] = {}


def weights_of(run_folder: Path) -> dict[str, torch.Tensor]:
    if run_folder not in _states:
        _states[run_folder] = weights(run_folder / "weights" / "last.pt")
    return _states[run_folder]


def seen(folder: Path) -> list[str]:
    file = folder / "seen.txt"
    return file.read_text().splitlines() if file.exists() else []
