"""A warning that all nodes give when they load the same data is shown once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import evener

TASK = """
import warnings
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def data():
    warnings.warn("three rows are odd", stacklevel=1)
    return TensorDataset(torch.arange(64.0).reshape(32, 2), torch.zeros(32, 1))

def task():
    return Task(
        model=lambda: nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        train_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
        batch_size=16,
        epochs=1,
    )
"""


@pytest.mark.slow
def test_data_warning_is_shown_once_for_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(TASK)
    words = ("train", "odd.py", "--local-nodes", "1,1", "--shares", "1,1", "--no-check")
    run = evener(*words, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    assert (run.stdout + run.stderr).count("UserWarning: three rows are odd") == 1
