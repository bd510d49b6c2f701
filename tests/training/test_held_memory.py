"""What a rank holds while it trains: weights, gradients and optimizer state, and no other copy of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.commands.train import perform
from evener.config.run_config import RunConfig

TASK = '''
import gc
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener

OUTPUT, FEATURES = 37, 1013


def loss(outputs, targets):
    """Write how many tensors have the bytes of the large weight."""
    if len(outputs):
        places = {
            tensor.untyped_storage()._cdata
            for tensor in gc.get_objects()
            if issubclass(type(tensor), torch.Tensor) and tensor.device.type != "meta"
            if tensor.untyped_storage().nbytes() == OUTPUT * FEATURES * 4
        }
        with open(Path(__file__).with_name("held") / str(os.getpid()), "a") as file:
            file.write(f"{len(places)}\\n")
    return nn.functional.cross_entropy(outputs, targets)


def task():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, FEATURES), torch.randint(0, 5, (64,)))
    return evener.Task(
        name="held",
        model=lambda: nn.Sequential(nn.Linear(FEATURES, OUTPUT), nn.ReLU(), nn.Linear(OUTPUT, 5)),
        loss=loss,
        train_data=lambda: data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=8,
        epochs=2,
    )
'''


@pytest.mark.parametrize(
    ("strategy", "elastic", "whole"),
    [
        ("data", True, 2),  # the weight and its momentum; the gradients of all weights have one storage
        pytest.param("data", False, 2, marks=pytest.mark.slow),
        ("filter", False, 0),
        pytest.param("filter", True, 1, marks=pytest.mark.slow),  # the model from which lost parts are made again
        pytest.param("pipeline", False, 1, marks=pytest.mark.slow),  # the last stage computes the loss
    ],
)
def test_rank_that_trains_holds_one_copy_of_its_weights(
    strategy: str, elastic: bool, whole: int, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (tmp_path / "held_task.py").write_text(TASK)
    perform(
        RunConfig(
            task=str(tmp_path / "held_task.py"),
            local_nodes="1,1",
            strategy=strategy,
            shares="measured" if strategy == "pipeline" else "1,1",
            elastic=elastic,
            check=False,
            output=tmp_path / "run",
        )
    )
    counts = [[int(line) for line in file.read_text().split()] for file in held.iterdir()]
    assert max(rank[-3] for rank in counts if len(rank) > 16) == whole  # others computed losses before the run only
