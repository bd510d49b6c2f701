"""The base install has no PyTorch: what needs it says so in one sentence, the rest works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evener.records.version import pip_install

_START = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'evener'; from evener.cli.app import main; main()"


def evener(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`evener WORDS` in a process that cannot import PyTorch."""
    return subprocess.run(
        [sys.executable, "-c", _START, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_invalid_option_is_reported_before_pytorch_is_loaded(tmp_path: Path) -> None:
    loaded = "import sys, evener.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=tmp_path, timeout=60, check=False).returncode == 0
    result = evener("train", "digits", "--epochs", "0", cwd=tmp_path)
    assert result.stderr.startswith("evener: --epochs must be positive")


@pytest.mark.parametrize("words", [("train", "digits"), ("benchmark",), ("demo",), ("trace", "digits")], ids=" ".join)
def test_commands_that_need_pytorch_give_an_install_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = evener(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"evener: this needs PyTorch, which is not installed: {pip_install('torch')}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "nowhere.py"), "there is no task file"),
        (("train", "digitz"), "there is no task 'digitz', did you mean 'digits'?"),
        (("trace", "digitz"), "there is no task 'digitz', did you mean 'digits'?"),
        (("benchmark", "--task", "digitz"), "there is no task 'digitz', did you mean 'digits'?"),
        (("train", "digits", "--local-nodes", "1,x"), "--local-nodes must be SPEED"),
        (("plan", "resnet512"), "nor a network of that name, did you mean 'resnet152'?"),
        (("plan", "nowhere.py"), "there is no task file"),
        (("plan", "resnet50"), "there is no cluster.json here, which `evener benchmark` writes"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_misspelt_name_is_reported_before_pytorch_is_loaded(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    result = evener(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("train", "digits", "--resume"),
        ("train", "digits", "--resume", "--checkpoint", "empty"),
        ("train", "digits", "--resume", "--output", "nowhere", "--local-nodes", "1,0.5"),
        ("train", "nowhere/last.pt", "--option", "resume=True"),
        ("yolo", "detect", "train", "resume", "model=nowhere/last.pt"),
        ("yolo", "detect", "train", "model=yolov8n.yaml", "resume=empty"),
        ("tune", "digits", "--resume", "--output", "empty", "--vary", "channels=8..16"),
    ],
    ids=" ".join,
)
def test_folder_without_checkpoint_is_rejected_before_pytorch_loads(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    result = evener(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert any(name in result.stderr for name in ("nowhere", "empty", "runs/digits-"))
    assert result.stdout + result.stderr == result.stderr
    assert result.stderr.count("\n") == 1


def test_version_and_help_need_no_pytorch(tmp_path: Path) -> None:
    assert '"evener": "' in evener("version", cwd=tmp_path).stdout
    assert "benchmark" in evener("--help", cwd=tmp_path).stdout


def test_report_needs_no_pytorch(tmp_path: Path) -> None:
    result = evener("report", "none.json", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "evener: cannot read none.json: No such file or directory\n"


def test_private_master_needs_no_pytorch() -> None:
    code = "import sys; sys.modules['torch'] = None; from evener.commands import private_master, train_by_agreement"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
