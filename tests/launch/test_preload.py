"""Modules that a fork server cannot load: its processes say so, and the server goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import reload
from pathlib import Path

import pytest

from evener.launch import preload
from evener.records.errors import EvenerError
from support.commands import TINY, evener

THIN = """
import numpy as np
from evener import ThinTask
from evener.autodiff import functional as F, nn, optim

thin_task = ThinTask(model=lambda: nn.Linear(4, 2), loss=F.cross_entropy, optimizer=lambda p: optim.SGD(p, lr=0.1),
                     train_data=lambda: (np.ones((65, 4), np.float32), np.arange(65) % 2), batch_size=13, epochs=1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    reload(preload)


def test_preload_records_an_error_and_ignores_missing_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "evener_test_broken.py").write_text("raise ValueError('a variable is wrong')")
    monkeypatch.setenv(preload.NAMES, "evener_test_missing,json")
    reload(preload)
    assert preload.error is None
    monkeypatch.setenv(preload.NAMES, "evener_test_missing,evener_test_broken,json")
    reload(preload)
    assert str(preload.error) == "a variable is wrong"
    assert preload.NAMES not in os.environ


@pytest.mark.parametrize(
    "words",
    [
        ("train", TINY, "--output", "run"),
        pytest.param(
            ("train", "thin.py", "--agreement", "average", "--local-nodes", "1,1", "--output", "run"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["here", "by a fork server"],
)
@pytest.mark.timeout(120)
def test_variable_that_breaks_pytorch_gives_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "thin.py").write_text(THIN)
    ended = evener(*words, cwd=tmp_path, TORCH_DISTRIBUTED_DEBUG="nonsense")
    assert ended.returncode == EvenerError.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("evener: ")]
    assert len(sentences) == 1
    assert "PyTorch cannot be loaded" in sentences[0]
    assert "TORCH_DISTRIBUTED_DEBUG" in sentences[0]


def test_symlink_loop_in_dashboard_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    ended = evener("dashboard", "loop", cwd=tmp_path)
    assert ended.returncode in (1, 2), ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
