"""Optimizers of BatchTasks: with a closure that they call, without one, and with errors of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SparseAdam
from torch.utils.data import TensorDataset

import evener
from evener.records.errors import InvalidInput, TrainingFailed
from support.damped_optimizer import Damped
from support.refusals import refused


def data() -> TensorDataset:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.argmax(1) % 3)


def batches(**fields: Any) -> evener.BatchTask:
    base = {
        "model": lambda: nn.Linear(4, 3),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "train_data": data,
        "batch_size": 10,
        "epochs": 2,
    }
    return evener.BatchTask(**{**base, **fields})


class Plain(Damped):
    """Takes no closure."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class Skipping(Damped):
    """Leaves out parameters that have no gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(p.grad is not None for p in self.param_groups[0]["params"]):
            super().step()


@pytest.mark.parametrize("optimizer", [Damped, Skipping])
def test_an_optimizer_that_does_not_call_its_closure_is_refused(tmp_path: Path, optimizer: type[Damped]) -> None:
    with pytest.raises(InvalidInput) as error:
        evener.train(batches(optimizer=lambda model: optimizer(model.parameters())), output=tmp_path / "x", quiet=True)
    assert "does not call the closure that its step takes" in str(error.value)


class Calling(Damped):
    """Calls its closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        super().step()


def test_an_optimizer_that_takes_no_closure_trains_as_one_that_calls_it(tmp_path: Path) -> None:
    found = {}
    for optimizer in (Plain, Calling):
        made = batches(optimizer=lambda model, optimizer=optimizer: optimizer(model.parameters()))
        model, record = evener.train(made, output=tmp_path / optimizer.__name__, quiet=True, precision="fp64")
        found[optimizer] = model.state_dict()["weight"]
        assert None not in [step.loss for step in record.steps]
    assert torch.equal(found[Plain], found[Calling])


def test_optimizer_step_error_is_reported_in_one_sentence(tmp_path: Path) -> None:
    made = batches(optimizer=lambda model: SparseAdam(list(model.parameters())))
    with refused(TrainingFailed):
        evener.train(made, output=tmp_path / "x", quiet=True)
