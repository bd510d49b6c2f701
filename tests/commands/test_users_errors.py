"""An error of a user's model, loss or data is one sentence: what was wrong, where, and in which step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment, explained
from evener.records.errors import first_line, noting, place_of, text_of, words_of
from support.commands import evener, evener_here

TASK = """
import sys
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from evener import BatchTask, Task

def data(samples=65, classes=2):
    return TensorDataset(torch.randn(samples, 4), torch.arange(samples) % classes)

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

class Samples(Dataset):
    def __len__(self): return 65
    def __getitem__(self, i): return item(i), 0

def batch_loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])

words = dict(model=net, loss=nn.functional.cross_entropy, train_data=data, batch_size=13)
"""
"""65 samples in batches of 13: none is left over."""


@pytest.mark.parametrize(
    ("change", "code", "sentences"),
    [
        ("words['batch_size'] = 64", 2, ["the last batch of every epoch has 1 of the 65 samples", "such as 63"]),
        (
            "words = {**words, 'batch_size': 64, 'loss': batch_loss}; Task = BatchTask",
            2,
            ["the last batch of every epoch has 1 of the 65 samples"],
        ),
        ("words['batch_size'] = 1", 2, ["a batch has 1 of the 65 samples"]),
        (
            "words['train_data'] = lambda: data(classes=5)",
            3,
            ["is out of bounds", "in the task's loss, own.py, line 20", "int64 from 0 to 4", "at step 1"],
        ),
        (
            "words['validation_data'] = lambda: data(classes=5)",
            3,
            ["is out of bounds", "in the task's loss, own.py, line 20", "at step 5"],
        ),
        ("words['train_data'] = lambda: TensorDataset(torch.ones(65, 3), torch.ones(65).long())", 3, ["in Linear of"]),
        (
            "item = lambda i: torch.ones(i); words['train_data'] = Samples",
            3,
            ["the task's data, where a batch is made"],
        ),
        (
            "item = lambda i: None; words['train_data'] = Samples",
            3,
            ["the task's data, where a batch is made of samples"],
        ),
        ("item = lambda i: 1 / (i - 30); words['train_data'] = Samples", 3, ["division by zero", "at sample 30"]),
        ("words['model'] = lambda: None", 2, ["the task's model must return an nn.Module, it returned NoneType"]),
        ("words['optimizer'] = lambda p: None", 2, ["the task's optimizer must return an optimizer of torch.optim"]),
        ("words['scheduler'] = lambda o, n: None", 2, ["the task's scheduler must return a schedule"]),
        ("words['loss'] = lambda o: o.mean()", 3, ["takes 1 positional argument but 2", "in the task's loss, own.py"]),
        ("words['loss'] = lambda o, t: o.mean().detach()", 2, ["depends on no trainable weight"]),
        ("words['validation_data'] = lambda: data(0)", 2, ["validation samples must be at least one, got 0"]),
        ("words['validation_data'] = data; words['correct'] = lambda o, t: o", 2, ["not one number: add up what is"]),
        ("words['batch_size'] = '8'", 2, ["Task.batch_size must be a positive whole number, got '8'"]),
        ("words['name'] = 'x\\nevener: done'", 2, ["Task.name must be text that can be printed"]),
        ("words['model'] = lambda: nn.Linear(4, 2, device='meta')", 3, ["in the task's model, where it is moved"]),
        ("sys.exit(0)", 3, ["ends the process by itself"]),
        ("words['train_data'] = lambda: sys.exit(0)", 3, ["ended itself by sys.exit(0)"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_in_user_code_gives_one_sentence(tmp_path: Path, change: str, code: int, sentences: list[str]) -> None:
    (tmp_path / "own.py").write_text(f"{TASK}{change}\ntask = Task(**words)\n")
    result = evener_here("train", "own.py", "--epochs", "1", cwd=tmp_path)
    assert result.returncode == code, result.stderr
    for sentence in sentences:
        assert sentence in result.stderr
    assert result.stderr.startswith("evener: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ("words['validation_data'] = data; words['correct'] = lambda o, t: o", 2, "not one number: add up what is"),
        ("words['validation_data'] = lambda: data(0)", 2, "validation samples must be at least one, got 0"),
        (
            "words |= dict(model=lambda: nn.Sequential(net(), nn.Flatten(0)), loss=lambda o, t: o.mean());"
            "words['validation_data'] = data",
            2,
            "the model returns a tensor of 1 dims",
        ),
        ("words['optimizer'] = lambda p: None", 2, "it returned NoneType (own.py, line 21)"),
        ("words['loss'] = lambda o: o.mean()", 3, "(in the task's loss, own.py, line 21, called with"),
        ("words['train_data'] = lambda: sys.exit(0)", 3, "ended itself by sys.exit(0) (in <lambda>, own.py, line 21"),
        ("words['loss'] = lambda o, t: sys.exit(0)", 3, "ended itself by sys.exit(0) (in <lambda>, own.py, line 21"),
    ],
    ids=["correct", "validation", "outputs", "optimizer", "loss", "exit of the data", "exit of the loss"],
)
def test_error_on_all_nodes_of_an_agreement_gives_the_same_sentence_once(
    tmp_path: Path, change: str, code: int, sentence: str
) -> None:
    (tmp_path / "own.py").write_text(f"{TASK}{change}\ntask = Task(**words)\n")
    words = ("--agreement", "average", "--local-nodes", "1,0.5", "--epochs", "1")
    result = evener_here("train", "own.py", *words, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("evener: ")
    assert last.count(sentence) == 1
    assert "Traceback" not in result.stderr


def test_error_in_a_data_loader_process_gives_one_sentence(tmp_path: Path) -> None:
    change = "item = lambda i: 1 / (i - 30)\nwords['train_data'] = Samples"
    (tmp_path / "own.py").write_text(f"{TASK}{change}\ntask = Task(**words)\n")
    result = evener("train", "own.py", "--workers", "1", cwd=tmp_path)
    assert result.returncode == 3
    assert "evener: ZeroDivisionError: division by zero (" in result.stderr
    assert "in the task's data, at sample 30)" in result.stderr
    assert "Traceback" not in result.stderr


def test_error_from_a_data_loader_process_reads_like_a_local_one() -> None:
    def passed_on() -> None:
        try:
            with noting("data, at sample 0"):
                raise ZeroDivisionError("division by zero")
        except ZeroDivisionError:
            wrapped: Any = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
        wrapped.reraise()

    with pytest.raises(ZeroDivisionError) as raised:
        passed_on()
    assert words_of(raised.value) == "ZeroDivisionError: division by zero"
    assert "in the task's data, at sample 0" in place_of(raised.value)


class Odd(Exception):
    """An error whose message cannot be made."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def test_error_without_a_message_is_named_by_its_class() -> None:
    assert words_of(Odd()) == first_line(Odd()) == "Odd"
    assert text_of(Odd()) == ""
    cpu = torch.device("cpu")
    env = RankEnvironment(0, [NodeSpec(name="ada"), NodeSpec(name="bob")], cpu, 1.0, lambda _: None)
    assert "Odd" in words_of(explained(Odd(), env))
