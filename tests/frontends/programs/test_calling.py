"""`evener.train` as a notebook calls it: objects that lie in no file, callbacks, an early end, loggers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.config.conflicts import AGREEMENT_OPTIONS, MASTER_OPTIONS
from evener.records.errors import InvalidInput, MissingExtra
from evener.records.record import Step
from evener.records.version import pip_install
from support.commands import TINY
from support.refusals import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x))
        return out


def made_up() -> TensorDataset:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.argmax(1) % 3)


def task(**words: Any) -> evener.Task:
    base = {"model": Net, "loss": nn.functional.cross_entropy, "train_data": made_up, "batch_size": 10, "epochs": 4}
    return evener.Task(**{**base, **words})


def trained(tmp_path: Path, what: Any, **words: Any) -> evener.Trained:
    return evener.train(what, output=tmp_path / "run", quiet=True, precision="fp64", **words)


def test_train_without_nodes_preserves_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, record = trained(tmp_path, task())
    assert torch.equal(torch.rand(3), expected)
    assert isinstance(model, Net)
    assert record.final_loss is not None
    assert record.final_loss < 1.2
    assert record.plan.strategy == "serial"
    x, targets = made_up().tensors
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model.eval()(x.double()), targets)) < 1.2


def test_train_accepts_named_tasks_and_functions_with_options(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "named", TINY, option={"lr": 0.2}, epochs=1)
    assert isinstance(model, nn.Sequential)
    _, record = trained(tmp_path / "made", lambda rate="0.1": task(epochs=int(float(rate) * 10)), option={"rate": 0.2})
    assert record.epochs == 2


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import evener

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)
    def forward(self, x):
        return self.linear(self.norm(x))

def data():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.argmax(1) % 3)

loss = nn.functional.cross_entropy
task = evener.Task(model=Net, loss=loss, train_data=data, validation_data=data, batch_size=10, epochs=9)
epochs, steps = [], []

def watch(event):
    if isinstance(event, evener.Epoch):
        epochs.append(event)
        return len(epochs) == 3
    steps.append(event)

loggers = [evener.TensorBoard("board")]
found = {}
for speeds in (None, [1, 0.5]):
    words = {} if speeds is None else {"local_nodes": speeds, "shares": "3,1"}
    words = {"precision": "fp64", "output": f"run{speeds}", **words}
    model, record = evener.train(task, callbacks=[watch], loggers=loggers, **words)
    assert len(epochs) == 3 and epochs[-1].validation.loss > 0 and epochs[-1].loss > 0, epochs
    assert record.steps[-1].step == 9 and any(e.kind == "ended" for e in record.events)
    assert len(record.nodes) == (1 if speeds is None else 2)
    found[speeds is None] = torch.cat([p.detach().flatten() for p in model.parameters()])
    epochs.clear()
print("off", float((found[True] - found[False]).abs().max()))
"""


@pytest.mark.slow
def test_program_from_stdin_on_local_nodes_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    words = [sys.executable, "-"]
    done = subprocess.run(words, input=SCRIPT, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rsplit("off", 1)[1]) < 1e-12
    assert list((tmp_path / "board").iterdir())


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rsplit("off", 1)[1]) < 1e-12


def test_task_holding_an_open_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    held = (tmp_path / "file").open("w")
    with held, refused(InvalidInput):
        trained(tmp_path, task(loss=lambda o, t: held), local_nodes="1,1")


def test_missing_cloudpickle_error_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingExtra, match=re.escape(pip_install("notebook"))):
        trained(tmp_path, task(), local_nodes="1,1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"epoch": 3}, "evener.train has no option 'epoch', did you mean 'epochs'?"),
        ({"epochs": "3"}, "evener.train: epochs must be a whole number, got '3'"),
        ({"epochs": 0}, "--epochs must be positive"),
        ({"agreement": "async"}, "a master's nodes are for `evener train --agreement`"),
        ({"option": {"lr": 1}}, "is not a function, so it takes no data folder and no options"),
        ({"batch_size": 31}, "--batch-size must be at most the 30 training samples, got 31"),
    ],
)
def test_invalid_train_arguments_are_refused(tmp_path: Path, words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        trained(tmp_path, task(), **words)
    assert sentence in str(refused.value)


def test_train_under_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(InvalidInput):
        trained(tmp_path, task())


def test_callback_error_reaches_the_caller(tmp_path: Path) -> None:
    def fail(event: object) -> None:
        if isinstance(event, Step):
            raise RuntimeError(dedent("mine"))

    with pytest.raises(Exception, match="mine"):
        trained(tmp_path, task(), callbacks=[fail])


@pytest.mark.parametrize("name", [*AGREEMENT_OPTIONS, *MASTER_OPTIONS])
def test_options_of_a_master_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(InvalidInput):
        evener.train(nn.Linear(1, 1), **options)
