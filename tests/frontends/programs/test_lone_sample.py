"""A program with a batch of one sample, which BatchNorm cannot take, ends before the first step, or with the cure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from evener.frontends.programs.divided_loader import single_sample_advice
from support.commands import evener_here

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
import evener

run = evener.join()
{first}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), {norm}(8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(21, 6), torch.arange(21) % 3)

class Stream(IterableDataset):
    def __iter__(self):
        return iter([data[index] for index in range(21)])

class SizedStream(Stream):
    def __len__(self):
        return 21

class Own(BatchSampler):
    def __iter__(self):
        yield from (list(range(10)), list(range(10, 20)), [20])

model, optimizer = run.prepare(model, optimizer)
loader = {loader}
if isinstance(loader, DataLoader):
    loader = run.prepare(loader)
for epoch in run.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        open("stepped", "a").close()
"""
PLAIN = "DataLoader(data, batch_size=10)"
ORDER = "SequentialSampler(data), 10, False"
SHARED = "(run.share((data.tensors[0][i : i + 10], data.tensors[1][i : i + 10])) for i in range(0, 21, 10))"
DRAWN = f"DataLoader(data, batch_sampler=Own({ORDER}))"


UNFORKED = "import os; del os.fork"
"""Hides `os.fork`, since a process that uses a GPU cannot be forked to try a batch of one sample."""


def ended(folder: Path, loader: str, *words: str, norm: str = "nn.BatchNorm1d", first: str = "") -> Any:
    (folder / "program.py").write_text(PROGRAM.format(norm=norm, loader=loader, first=first))
    return evener_here("run", *(words or ("--local-nodes", "1,1", "--shares", "3,1")), "program.py", cwd=folder)


@pytest.mark.parametrize(
    ("loader", "first"),
    [
        (PLAIN, ""),
        pytest.param(PLAIN, UNFORKED, marks=pytest.mark.slow),
        pytest.param(f"DataLoader(data, batch_sampler=BatchSampler({ORDER}))", "", marks=pytest.mark.slow),
        pytest.param("DataLoader(data, batch_sampler=[[*range(20)], [20]])", "", marks=pytest.mark.slow),
        pytest.param("DataLoader(SizedStream(), batch_size=10)", "", marks=pytest.mark.slow),
        pytest.param("DataLoader(Stream(), batch_size=1)", "", marks=pytest.mark.slow),
    ],
)
def test_single_sample_batch_is_refused_before_the_first_step(tmp_path: Path, loader: str, first: str) -> None:
    end = ended(tmp_path, loader, first=first)
    assert end.returncode == 2, end.stderr
    assert not (tmp_path / "stepped").exists()
    assert "BatchNorm" in end.stderr
    assert "Traceback" not in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", UNFORKED], ids=["forked", "not forked"])
@pytest.mark.parametrize("norm", ["nn.LayerNorm", "PIXELS"])
def test_single_sample_batch_trains_if_the_model_accepts_it(tmp_path: Path, norm: str, first: str) -> None:
    pixels = "nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Identity"
    end = ended(tmp_path, PLAIN, norm=norm.replace("PIXELS", pixels), first=first)
    assert end.returncode == 0, end.stderr
    assert (tmp_path / "stepped").exists()


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DRAWN, ()),
        pytest.param("DataLoader(Stream(), batch_size=10)", (), marks=pytest.mark.slow),
        pytest.param(SHARED, (), marks=pytest.mark.slow),
        pytest.param(PLAIN, ("--local-nodes", "1"), marks=pytest.mark.slow),
        pytest.param(DRAWN, ("--local-nodes", "1,1", "--strategy", "filter"), marks=pytest.mark.slow),
    ],
)
def test_unpredicted_single_sample_batch_ends_with_advice(tmp_path: Path, loader: str, words: tuple[str, ...]) -> None:
    end = ended(tmp_path, loader, *words)
    assert end.returncode == 2, end.stderr
    assert "drop_last=True" in end.stderr
    assert "Traceback" not in end.stderr
    assert "Expected more than 1 value" not in end.stderr


@pytest.mark.slow
def test_unpredicted_single_sample_batch_ends_torchrun_with_advice(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(norm="nn.BatchNorm1d", loader=DRAWN, first=""))
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    ranks = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert "exitcode  : 2 " in ranks.stderr, ranks.stderr
    assert ranks.stderr.count("drop_last=True") == 2
    assert "Expected more than 1 value" not in ranks.stderr


class Counted(BatchSampler):
    """A sampler that counts its iterations."""

    passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        return super().__iter__()


class Stream(IterableDataset[Any]):
    """A stream with a length."""

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("no sample is read")


DATA = TensorDataset(torch.zeros(21, 1))
ROWS = SequentialSampler(DATA)


@pytest.mark.parametrize(
    ("loader", "is_known"),
    [
        (DataLoader(DATA, batch_size=10), True),
        (DataLoader(DATA, batch_size=10, drop_last=True), False),
        (DataLoader(DATA, batch_size=9), False),
        (DataLoader(DATA, batch_size=1, drop_last=True), True),
        (DataLoader(DATA, batch_sampler=BatchSampler(ROWS, 10, False)), True),
        (DataLoader(DATA, batch_sampler=BatchSampler(ROWS, 10, True)), False),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), True),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3, 4]]), False),
        (DataLoader(DATA, batch_sampler=Counted(ROWS, 10, False)), False),
        (DataLoader(Stream(), batch_size=10), True),
        (DataLoader(Stream(), batch_size=10, num_workers=2), False),
        (DataLoader(Stream(), batch_size=10, drop_last=True), False),
    ],
)
def test_single_sample_batches_are_predicted_without_loading_any(loader: DataLoader[Any], is_known: bool) -> None:
    assert bool(single_sample_advice(loader)) == is_known
    assert getattr(loader.batch_sampler, "passes", 0) == 0
