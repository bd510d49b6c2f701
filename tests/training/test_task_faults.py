"""What a Task cannot have ends before the first step in one sentence; what it can have trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.commands import evener_here

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from evener import Task

class Ragged(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.ones(3 + index % 4), index % 3

class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
    def forward(self, x):
        return {{"logits": self.inner(x)}}

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(4, 3, batch_first=True)
        self.register_buffer("state", torch.zeros(1, 16, 3))
    def forward(self, x):
        return self.inner(x[:, None], self.state)[0][:, -1]

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)
    def forward(self, x):
        return self.inner(self.table(x).mean(1))

class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    def forward(self, x):
        return (x.to(self.mix.dtype) @ self.mix).abs()

class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(16, 3)
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(torch.relu(self.first(x)))
            x = self.last(x.flatten(1))
        return x.float()

class Perturbed(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it requires closure"

def flat():
    return TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)

def images():
    return TensorDataset(torch.randn(32, 2, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)

def words():
    return TensorDataset(torch.arange(160).view(32, 5) % 9, torch.arange(32) % 3)

def linear():
    return nn.Linear(4, 3)

plateau = torch.optim.lr_scheduler.ReduceLROnPlateau

def task():
    torch.manual_seed(0)
    return Task(batch_size=16, **dict(dict(model=linear, loss=F.cross_entropy, train_data=flat), {options}))
"""


def train(folder: Path, options: str, *words: str) -> tuple[int, str, bool]:
    """(exit code, last line, whether a step was made) of a run of a task with these options."""
    (folder / "my_task.py").write_text(TASK.format(options=options))
    nodes = () if "--local-nodes" in words else ("--local-nodes", "1,1", "--shares", "3,1")
    result = evener_here("train", "my_task.py", *nodes, *words, "--output", "out", cwd=folder)
    assert "Traceback" not in result.stderr, result.stderr
    shown = result.stdout + result.stderr
    last = (result.stderr.strip().splitlines() or [""])[-1]
    return result.returncode, last, re.search(r"^step 1 ", shown, re.MULTILINE) is not None


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("optimizer=torch.optim.LBFGS", "BatchTask"),
        pytest.param("optimizer=lambda p: Perturbed(p, lr=0.1)", "BatchTask", marks=pytest.mark.slow),
        pytest.param("scheduler=lambda one, _: plateau(one)", "BatchTask", marks=pytest.mark.slow),
        pytest.param("train_data=Ragged, model=lambda: nn.Linear(3, 3)", "collate_fn", marks=pytest.mark.slow),
        pytest.param(
            "model=Outputs, loss=lambda o, t: F.cross_entropy(o['logits'], t), validation_data=flat",
            "Task.correct",
            marks=pytest.mark.slow,
        ),
        pytest.param("model=Hidden", "as large as its inputs", marks=pytest.mark.slow),
    ],
)
def test_unsupported_tasks_are_refused_before_the_first_step(tmp_path: Path, options: str, cure: str) -> None:
    code, sentence, has_stepped = train(tmp_path, options)
    assert code == 2
    assert cure in sentence
    assert not has_stepped


@pytest.mark.slow
def test_unsavable_weights_are_refused_before_the_first_step(tmp_path: Path) -> None:
    code, sentence, has_stepped = train(tmp_path, "model=Complex", "--precision", "fp64")
    assert code == 2
    assert "complex128" in sentence
    assert not has_stepped


NARROW = "model=Narrow, train_data=images"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("model=Words, train_data=words", ()),
        pytest.param("model=Complex", (), marks=pytest.mark.slow),
        pytest.param(
            NARROW,
            ("--strategy", "channel", "--local-nodes", "1,1,1", "--shares", "5,0,3"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            NARROW, ("--strategy", "filter", "--local-nodes", "1,1", "--shares", "1,0"), marks=pytest.mark.slow
        ),
    ],
)
def test_sparse_complex_and_narrow_values_train(tmp_path: Path, options: str, words: tuple[str, ...]) -> None:
    assert train(tmp_path, options, *words)[0] == 0


DROPPING = """
class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6))
        self.last = nn.Linear(4, 3)
    def forward(self, x):
        for block in self.blocks:
            if self.training and torch.rand(1) < 0.5:
                continue
            x = x + block(x)
        return self.last(x)
"""


@pytest.mark.slow
def test_randomly_skipped_layers_end_the_run_instead_of_blocking(tmp_path: Path) -> None:
    (tmp_path / "dropping.py").write_text("import torch\nfrom torch import nn\n" + DROPPING)
    code, sentence, _ = train(tmp_path, "model=__import__('dropping').Dropping")
    assert code == 2
    assert "batch statistics of blocks." in sentence or "random number for the whole batch" in sentence
