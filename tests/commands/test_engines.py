"""A task has the same sizes, layout, names of weights and optimiser, whichever backend computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from evener.agreements.settings import Adam
from evener.commands.engines import is_thin, load_backend
from evener.config.run_config import RunConfig
from evener.ps.node.engine import ModelBackend
from support.commands import TINY

SMALL = {"channels": "4", "blocks": "1"}
THIN_ONLY = """
import numpy as np
from evener.autodiff import functional as F, nn, optim
from evener.records.task import ThinTask

thin_task = ThinTask(name="alone", model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, batch_size=4,
    train_data=lambda: (np.zeros((8, 3), np.float32), np.zeros(8, np.int64)),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
"""


@pytest.fixture(params=["torch", "thin"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where PyTorch is, and where it is missing."""
    if request.param == "thin":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return str(request.param)


def both(asked: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelBackend, ModelBackend]:
    torch, task = load_backend(asked)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    thin, twin = load_backend(asked)
    assert asked.sizes_of(task) == asked.sizes_of(twin)
    return torch, thin


def test_task_and_thin_task_are_equal_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, thin = both(RunConfig(task="digits", option=SMALL, epochs=2), monkeypatch)
    sizes = ("name", "num_samples", "num_validation", "has_accuracy", "clip_norm", "normalises", "layout")
    assert {name: getattr(torch, name) for name in sizes} == {name: getattr(thin, name) for name in sizes}
    ours, theirs = torch.server_optimizer(10), thin.server_optimizer(10)
    assert isinstance(ours, Adam)
    assert isinstance(theirs, Adam)
    np.testing.assert_allclose(ours.learning_rate, theirs.learning_rate, rtol=1e-6)
    assert (ours.betas, ours.eps, ours.weight_decay, ours.is_decoupled) == (
        theirs.betas,
        theirs.eps,
        theirs.weight_decay,
        theirs.is_decoupled,
    )


def test_final_weights_are_written_by_name(kind: str, tmp_path: Path) -> None:
    backend, _ = load_backend(RunConfig(task="digits", option=SMALL))
    assert type(backend).__name__.lower().startswith(kind)
    arrays = {name: array + 1 for name, array in backend.initial_weights().views().items()}
    backend.write_weights(save(arrays), tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_file_with_only_a_thin_task_is_thin(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(THIN_ONLY)
    (tmp_path / "both.py").write_text("task = None\nthin_task = None\n")
    assert is_thin(str(tmp_path / "alone.py"))
    assert not is_thin(str(tmp_path / "both.py"))
    assert not is_thin(TINY)
    assert not is_thin("digits")
    assert not is_thin(str(tmp_path / "none.py"))
    backend, _ = load_backend(RunConfig(task=str(tmp_path / "alone.py")))
    assert (backend.name, backend.num_samples, backend.num_validation) == ("alone", 8, 0)


def test_task_with_a_thin_version_is_thin_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert is_thin("digits")
    assert not is_thin("tiny-imagenet")
