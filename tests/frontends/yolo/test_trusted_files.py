"""What runs as a program because a file says so is told once, and refused by --trusted-only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from evener.config.run_config import RunConfig
from evener.frontends.yolo import command
from evener.frontends.yolo.command import SAFE_LOAD, refuse_programs, warning_of, what_runs
from evener.frontends.yolo.overrides import YoloConfig, run_config, yolo_config
from evener.records.errors import EvenerError, InvalidInput
from support.refusals import refused
from support.yolo_cases import needs_ultralytics
from support.yolo_commands import yolo

PYTHON = "import os; os.system('touch ran')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SAFE_LOAD, raising=False)
    (tmp_path / "x.pt").write_bytes(b"")
    (tmp_path / "code.yaml").write_text(f"names: [a]\ndownload: |\n  {PYTHON}\n")
    (tmp_path / "shell.yaml").write_text("names: [a]\ndownload: bash get.sh\n")
    (tmp_path / "archive.yaml").write_text("names: [a]\ndownload: https://example.org/a.zip\n")
    (tmp_path / "plain.yaml").write_text("names: [a]\n")
    for name in ("evaluated.yaml", "own8.yaml", "own5n-p6.yaml"):
        (tmp_path / name).write_text("nc: 1\nactivation: __import__('os').system('touch ran')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({"model": "x.pt"}, ["model=x.pt"]),
        ({"model": "yolov8n.yaml", "pretrained": "x.pt"}, ["pretrained=x.pt"]),
        ({"resume": "x.pt"}, ["resume=x.pt"]),
        ({"model": "https://example.org/x.pt"}, ["model=https://example.org/x.pt"]),
        ({"model": "yolov8n.yaml", "data": "code.yaml"}, ["data=code.yaml"]),
        ({"model": "yolov8n.yaml", "data": "shell.yaml"}, ["data=shell.yaml"]),
        ({"model": "evaluated.yaml"}, ["model=evaluated.yaml"]),
        ({"model": "own8n.yaml"}, ["model=own8n.yaml"]),
        ({"model": "own5n6.yaml"}, ["model=own5n6.yaml"]),
        ({"model": " evaluated.yaml"}, ["model= evaluated.yaml"]),
        ({"model": "https://example.org/a.yaml?b=1"}, ["model=https://example.org/a.yaml"]),
        ({"model": "https://example.org/x.pt?b=1"}, ["model=https://example.org/x.pt"]),
        ({"model": "yolov8n.yaml", "data": "https://example.org/a.yaml"}, ["data=https://example.org/a.yaml"]),
        ({"model": "yolov8n.yaml", "data": "ul://someone/data"}, ["data=ul://someone/data"]),
        ({"model": "yolov8n.yaml", "data": " code.yaml"}, ["data= code.yaml"]),
        ({"model": "yolov8n.yaml", "cfg": "mine.yaml"}, ["cfg=mine.yaml"]),
        ({"model": "x.pt", "data": "code.yaml"}, ["model=x.pt", "data=code.yaml"]),
        ({"model": "yolov8n.yaml", "data": "archive.yaml"}, []),
        ({"model": "yolov8n.yaml", "data": "plain.yaml"}, []),
        ({"model": "yolov8n.pt", "data": "coco8.yaml"}, []),
    ],
)
def test_files_that_run_code_are_named(words: dict[str, str], names: list[str], folder: Path) -> None:
    found = what_runs(words)
    assert len(found) == len(names)
    assert all(any(name in one for one in found) for name in names)
    assert bool(warning_of(words)) == bool(names)


@pytest.mark.parametrize("model", ["evaluated.yaml", "yolov8n.yaml"])
def test_trusted_only_refuses_code_before_loading_anything(model: str, folder: Path) -> None:
    with refused(InvalidInput):
        refuse_programs({"model": model, "data": "code.yaml"})


@pytest.mark.parametrize("home", [None, Path("home")])
def test_checkpoint_is_refused_without_safe_loading_in_ultralytics(
    home: Path | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.frontends.yolo.command._loads_safely", lambda: False)
    monkeypatch.setattr(command, "require_loadable", lambda: None)
    config = YoloConfig(overrides=("train", "model=x.pt", "data=plain.yaml"), home=home, trusted_only=True)
    with refused(InvalidInput):
        command.run(config, as_json=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"home": Path("home")}, {"agreement": "average", "local_nodes": "1,1"}],
    ids=["local", "master", "agreed"],
)
@pytest.mark.parametrize(
    ("task", "data"), [("x.pt", "plain.yaml"), ("x.pt", "code.yaml"), ("evaluated.yaml", "plain.yaml")]
)
def test_train_refuses_the_same_files_as_yolo(
    options: dict[str, Any], task: str, data: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.frontends.yolo.command._loads_safely", lambda: False)
    monkeypatch.setattr(command, "require_loadable", lambda: None)
    with pytest.raises(InvalidInput) as refused:
        command.train(RunConfig(task=task, data=Path(data), trusted_only=True, **options), as_json=False)
    assert (task if data == "plain.yaml" else data) in str(refused.value)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("agreement", [None, "average"])
def test_trusted_only_survives_conversion_and_refuses_program_tasks(agreement: Any) -> None:
    config = RunConfig(task="x.pt", home=Path("home"), agreement=agreement, trusted_only=True)
    assert yolo_config(config).trusted_only
    assert run_config(YoloConfig(overrides=("train", "model=x.pt"), home=Path("home"), trusted_only=True)).trusted_only
    with pytest.raises(InvalidInput):
        replace(config, task="node_program.py")


def test_trusted_only_refuses_program_tasks() -> None:
    for task in ("digits", "my_task.py"):
        with pytest.raises(InvalidInput):
            RunConfig(task=task, trusted_only=True)


def test_trusted_only_accepts_plain_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAFE_LOAD, "")
    refuse_programs({"model": "yolov8n.yaml", "data": "archive.yaml"})
    assert os.environ[SAFE_LOAD] == "1"


@pytest.mark.parametrize("way", ["local", "master"])
def test_code_warning_appears_once_for_local_and_master_runs(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(EvenerError):
        pass

    def begin(*_: Any, **__: Any) -> Any:
        raise Begun("it begins")

    monkeypatch.setattr(command, "on_local_nodes", begin)
    monkeypatch.setitem(sys.modules, "evener.frontends.yolo.master_run", SimpleNamespace(train_yolo_as_ranks=begin))
    monkeypatch.setattr(command, "require_loadable", lambda: None)
    config = YoloConfig(overrides=("train", "model=x.pt", "data=code.yaml"), home=folder if way == "master" else None)
    with pytest.raises(Begun):
        command.run(config, as_json=False)
    assert capsys.readouterr().err.count("--trusted-only") == 1
    assert run_config(config).task == "x.pt"


MALICE = """
import os, sys, torch
class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)
torch.save({"model": Evil()}, "evil.pt")
from evener.frontends.yolo.command import refuse_programs
refuse_programs({"model": "evil.pt"})
import torchvision_operators
from ultralytics import YOLO
try:
    YOLO("evil.pt")
except Exception as error:
    print("refused", type(error).__name__)
"""


@pytest.mark.slow
def test_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    words = [sys.executable, "-c", MALICE]
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert "refused" in result.stdout + result.stderr
    assert not (tmp_path / "ran").exists()


EVIL = """
import os, torch
class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)
torch.save({"model": Evil()}, "evil.pt")
"""
STRANGERS = [
    ("model=evil.pt", "model=evil.pt data=plain.yaml"),
    ("data=code.yaml", "model=yolov8n.yaml data=code.yaml"),
]
"""A stranger's file: its name in a message, and the words of a command with it."""


@needs_ultralytics
@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), STRANGERS, ids=["pickle", "download"])
def test_terminal_names_an_untrusted_file_before_it_runs(name: str, words: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", EVIL], cwd=folder, check=True)
    with (folder / "code.yaml").open("a") as file:
        file.write("train: images\nval: images\n")  # which are missing
    trained = yolo("yolo", "train", *words.split(), "epochs=1", "imgsz=32", cwd=folder)
    told = [line for line in trained.stderr.splitlines() if name in line and "as a program" in line]
    assert len(told) == 1, trained.stderr
    assert (folder / "ran").exists()  # as Ultralytics has it
    (folder / "ran").rename(folder / "it ran")
    refused_run = yolo("yolo", "train", *words.split(), "epochs=1", "imgsz=32", "--trusted-only", cwd=folder)
    assert refused_run.returncode == InvalidInput.exit_code, refused_run.stderr
    assert name.split("=")[1] in refused_run.stderr.splitlines()[-1]
    assert not (folder / "ran").exists()
