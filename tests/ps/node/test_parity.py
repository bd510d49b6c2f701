"""Two definitions of a task that differ anywhere are told apart, and the difference is named."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.commands.engines import load_backend
from evener.commands.train_by_agreement import check_of, prepare
from evener.config.run_config import RunConfig
from evener.ps.node.parity import check_parity
from evener.records.errors import InvalidInput, NotExact
from evener.records.task import Task, ThinTask
from support.refusals import refused


def arrays(count: int = 40, shift: float = 0.0) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.default_rng(0)
    rows = random.standard_normal((count, 8)).astype(np.float32)
    return rows + np.float32(shift), (rows.sum(1) > 0).astype(np.int64)


TASK = Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
    loss=cross_entropy,
    train_data=lambda: TensorDataset(*map(torch.from_numpy, arrays())),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    scheduler=lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps),
    batch_size=10,
    epochs=2,
)
THIN = ThinTask(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    loss=F.cross_entropy,
    train_data=arrays,
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    rate=lambda step, steps: 1 - step / steps,
    batch_size=10,
    epochs=2,
)


def test_equal_tasks_pass_the_parity_check() -> None:
    check_parity(TASK, THIN)
    check_parity(replace(TASK, scheduler=None), replace(THIN, rate=None))


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 2))},
        r"the parameter 0.weight of shape \(16, 8\), its thin twin has the parameter 0.weight of shape \(9, 8\)",
    ),
    "length": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2, bias=False))},
        "the task's model has 4 arrays, its thin twin has 3",
    ),
    "computing": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))},
        r"in step 1 the loss is [\d.]+, that of the thin twin [\d.]+",
    ),
    "count": ({"train_data": lambda: arrays(39)}, "the task has 40 training samples, its thin twin 39 inputs and 39 t"),
    "samples": ({"train_data": lambda: arrays(shift=0.01)}, "the inputs of the training samples differ"),
    "validation": ({"validation_data": arrays}, "one of the twins has validation data, the other none"),
    "batch": ({"batch_size": 11}, "batch_size is 10 in the task, 11 in its thin twin"),
    "optimiser": (
        {"optimizer": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.8)},
        "in step 2 the value after the optimiser's step of 0.weight differs",
    ),
    "rate": ({"rate": None}, "in step 2 the value after the optimiser's step of 0.weight differs"),
}


@pytest.mark.parametrize(("changes", "words"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_parity_check_names_the_difference(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_parity(TASK, replace(THIN, **changes))


def test_different_gradient_with_equal_loss_is_named() -> None:
    def read() -> tuple[NDArray[Any], NDArray[Any]]:
        rows, _ = arrays()
        return rows, rows[:, :1]

    task = replace(
        TASK,
        model=lambda: torch.nn.Linear(8, 1),
        loss=mse_loss,
        train_data=lambda: TensorDataset(*map(torch.from_numpy, read())),
    )
    thin = replace(THIN, model=lambda: nn.Linear(8, 1), train_data=read)
    check_parity(task, replace(thin, loss=F.mse_loss))
    with refused(InvalidInput):
        check_parity(
            task, replace(thin, loss=lambda outputs, targets: F.mse_loss(outputs, targets).detach() + 0 * outputs.sum())
        )


def test_dropout_and_gradient_clipping_do_not_affect_parity() -> None:
    dropping = replace(
        TASK,
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2)),
        clip_norm=0.01,
    )
    thin = replace(THIN, model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)))
    check_parity(dropping, thin)


TWIN = """
import numpy as np
from evener import Task, ThinTask
def read():
    rows = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    return rows, (rows.sum(1) > 0).astype(np.int64)
"""
TORCH = (
    TWIN
    + """
import torch
task = Task(model=lambda: torch.nn.Linear(8, 2), loss=torch.nn.functional.cross_entropy, batch_size=16,
    train_data=lambda: torch.utils.data.TensorDataset(*map(torch.from_numpy, read())))
"""
)
THINNED = (
    TWIN
    + """
from evener.autodiff import functional as F, nn, optim
thin_task = ThinTask(model=lambda: nn.Linear(8, 2), loss=F.cross_entropy, batch_size=16, train_data=read,
    optimizer=lambda parameters: optim.SGD(parameters, lr={rate}, momentum=0.9))
"""
)


@pytest.mark.parametrize(("rate", "is_same"), [(0.1, True), (0.2, False)])
def test_run_is_rejected_if_its_thin_task_trains_differently(tmp_path: Path, rate: float, is_same: bool) -> None:
    (tmp_path / "row.py").write_text(TORCH)
    (tmp_path / "row_thin.py").write_text(THINNED.format(rate=rate))
    config = RunConfig(task=str(tmp_path / "row.py"), agreement="sync")
    backend, task = load_backend(config)
    job, _ = prepare(config, backend, task)
    with nullcontext() if is_same else pytest.raises(NotExact):
        check_of(config, backend, task, job, lambda _: None)
