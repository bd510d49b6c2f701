"""Data that differ from node to node are told before anything is trained; what draws at random does not count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from evener.comm.group import Group
from evener.data.alike import first_other, require_same_data, steady_print
from evener.data.fingerprint import print_of
from evener.records.errors import InvalidInput
from support.commands import evener_here
from support.refusals import refused
from support.thread_ranks import together

TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split
from evener import Task

def data():
    drawn = torch.Generator().manual_seed(0)
    all_of_them = TensorDataset(torch.randn(60, 4, generator=drawn), torch.randint(3, (60,), generator=drawn))
    split = torch.Generator()
    split.SEED
    return random_split(all_of_them, [50, 10], split)[0]

task = Task(name="split", model=lambda: nn.Linear(4, 3), loss=nn.functional.cross_entropy, train_data=data,
            batch_size=10, epochs=1)
"""


class Noisy(Dataset[Any]):
    """Samples with noise: drawn from the generators that Evener seeds, or from its own."""

    def __init__(self, own: np.random.Generator | None = None) -> None:
        self._own = own

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return index + (torch.randn(3) if self._own is None else torch.from_numpy(self._own.normal(size=3)))


def _hold(datasets: list[Dataset[Any]]) -> None:
    def held(group: Group) -> None:
        require_same_data(group, datasets[group.rank], 0, "training data")

    together(len(datasets), held)


def test_equal_data_are_accepted() -> None:
    plain = TensorDataset(torch.arange(20.0))
    _hold([plain, plain, plain])


def test_seeded_noise_is_compared_and_unseeded_noise_is_ignored() -> None:
    assert steady_print(Noisy(), 7, seed=0) == steady_print(Noisy(), 7, seed=0) != steady_print(Noisy(), 7, seed=1)
    nothing = steady_print(Noisy(np.random.default_rng(1)), 7, seed=0)
    assert np.isnan(nothing)
    assert first_other(np.array([[2.0, nothing], [2.0, 3.0], [nothing, 4.0]])) is None
    assert first_other(np.array([[2.0, 3.0], [2.0, 3.0], [2.0, 4.0]])) == (2, 1)


def test_different_samples_and_sizes_are_reported_with_the_node() -> None:
    plain = TensorDataset(torch.arange(20.0))
    with refused(InvalidInput):
        _hold([plain, plain, Subset(plain, [*range(10), 11, 10, *range(12, 20)])])
    with refused(InvalidInput):
        _hold([plain, Subset(plain, range(19))])


@pytest.mark.parametrize("other", [{"a": "y", "b": 1}, {"a": "x", "b": 2}, {"a": "x", "b": np.ones(2)}])
def test_fingerprint_of_a_sample_depends_on_strings_and_numbers(other: dict[str, Any]) -> None:
    assert print_of({"a": "x", "b": 1}) == print_of({"a": "x", "b": torch.tensor(1)})
    assert print_of({"a": "x", "b": 1}) != print_of(other)


@pytest.mark.parametrize(("seed", "code"), [("seed()", 2), pytest.param("manual_seed(0)", 0, marks=pytest.mark.slow)])
def test_split_without_a_seed_ends_the_run_before_it_starts(tmp_path: Path, seed: str, code: int) -> None:
    (tmp_path / "task.py").write_text(TASK.replace("SEED", seed))
    done = evener_here("train", "task.py", "--local-nodes", "1,1", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        told = r"the training data of node-1 are not those of node-0: sample \d+ is another\. Seed what"
        assert re.search(told, done.stderr), done.stderr  # two orders of 60 begin alike now and then
