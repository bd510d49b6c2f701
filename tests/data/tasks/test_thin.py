"""Every thin task is its PyTorch twin: the same state, the same samples, the same losses, gradients and steps."""

from pathlib import Path

import numpy as np
import pytest

from evener.data.tasks.load import BUILT_IN_THIN_TASKS, has_thin_task, load_task, load_thin_task
from evener.ps.node.parity import check_parity
from evener.records.errors import InvalidInput, MissingExtra
from support.refusals import refused

OPTIONS = {"digits": {"channels": "4", "blocks": "2"}}


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of MNIST's files with a few random images."""
    folder, random = tmp_path_factory.mktemp("mnist"), np.random.default_rng(3)
    for split, count in (("train", 50), ("t10k", 20)):
        for name, shape, top in (("images-idx3", (count, 28, 28), 256), ("labels-idx1", (count,), 10)):
            head = bytes([0, 0, 8, len(shape)]) + np.asarray(shape, ">u4").tobytes()
            values = random.integers(0, top, shape, np.uint8)
            (folder / f"{split}-{name}-ubyte").write_bytes(head + values.tobytes())
    return folder


@pytest.mark.parametrize("name", BUILT_IN_THIN_TASKS)
def test_thin_built_in_task_equals_its_pytorch_twin(name: str, mnist: Path) -> None:
    data, options = (None if name == "digits" else mnist), OPTIONS.get(name, {})
    check_parity(load_task(name, data, options), load_thin_task(name, data, options))


def test_thin_task_is_found_in_the_file_next_to_the_task(tmp_path: Path) -> None:
    (tmp_path / "row.py").write_text("import nothing_that_exists\n")
    (tmp_path / "row_thin.py").write_text(_THIN_FILE)
    assert has_thin_task(str(tmp_path / "row.py"))
    assert load_thin_task(str(tmp_path / "row.py")).name == "line"


def test_thin_only_task_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(_THIN_FILE)
    assert load_thin_task(str(tmp_path / "line.py")).name == "line"


def test_missing_thin_tasks_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with refused(InvalidInput):
        load_thin_task(str(tmp_path / "empty.py"))
    with refused(InvalidInput):
        load_thin_task("mnits")
    assert not has_thin_task(str(tmp_path / "empty.py"))
    assert not has_thin_task("tiny-imagenet")


def test_thin_task_that_imports_missing_pytorch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "line.py").write_text("import torch\n" + _THIN_FILE)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with refused(MissingExtra):
        load_thin_task(str(tmp_path / "line.py"))


_THIN_FILE = """
import numpy as np
from evener.autodiff import functional as F, nn, optim
from evener.records.task import ThinTask

thin_task = ThinTask(
    name="line",
    model=lambda: nn.Linear(1, 1),
    loss=F.mse_loss,
    train_data=lambda: (np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
    has_accuracy=False,
)
"""
