"""Batches and micro-batches of one sample in a task: refused before the first step, in one sentence with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import evener_here

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def task(samples: int = 32):
    return Task(
        name="norm",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: TensorDataset(torch.arange(6.0 * samples).view(samples, 6), torch.arange(samples) % 3),
        batch_size=8,
        epochs=1,
    )
"""


@pytest.mark.parametrize(
    "words",
    [
        "--local-nodes 1,1 --option samples=33",
        pytest.param("--local-nodes 1 --option samples=33", marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1 --accumulate 4 --option samples=36", marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1 --strategy filter --option samples=33", marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1 --strategy pipeline --micro-batches 8", marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1,1,1 --strategy data+pipeline --micro-batches 4", marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1,1,1 --strategy data+pipeline --micro-batches 2 --option samples=37",
                     marks=pytest.mark.slow),
        pytest.param("--local-nodes 1,1 --agreement sync --option samples=33", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_single_sample_batch_is_refused_before_the_first_step(tmp_path: Path, words: str) -> None:
    (tmp_path / "norm.py").write_text(TASK)
    end = evener_here("train", "norm.py", *words.split(), "--output", "out", cwd=tmp_path)
    assert end.returncode == 2, end.stderr
    assert "BatchNorm" in end.stderr
    assert "Traceback" not in end.stderr
    assert "Expected more than 1 value" not in end.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()
