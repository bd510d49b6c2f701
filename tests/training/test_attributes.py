"""Counters in Python are part of a run's state: a resumed run has them, and so has a node that joins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import evener
from evener.records.errors import InvalidInput, TaskCannot
from evener.records.record import Event
from evener.training.attributes import Attributes, owners_of
from support.damped_optimizer import Damped
from support.refusals import refused


class Counting(nn.Module):
    """A layer that counts its passes in an attribute, and weakens with every one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.linear(x) / (1 + self.passes)
        return out


class CountingLoss(nn.Module):
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) / (1 + self.calls)


class Saved(Damped):
    """Has that mean in its state dict, as a number and as a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "size": self.size, "sizes": torch.full((2,), self.size, dtype=torch.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.size = own.pop("size")
        assert own.pop("sizes").tolist() == [self.size] * 2
        super().load_state_dict(own)


def data() -> TensorDataset:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.argmax(1) % 3)


def task(**fields: Any) -> evener.Task:
    base = {
        "model": lambda: nn.Linear(4, 3),
        "loss": nn.functional.cross_entropy,
        "train_data": data,
        "batch_size": 10,
        "epochs": 2,
    }
    return evener.Task(**{**base, **fields})


def weights(folder: Path, made: evener.Task, **options: Any) -> dict[str, Tensor]:
    model, _ = evener.train(made, output=folder, quiet=True, precision="fp64", **options)
    return model.state_dict()


@pytest.mark.parametrize(
    "fields",
    [
        lambda: {"model": Counting},
        lambda: {"loss": CountingLoss()},
        lambda: {"loss": CountingLoss().forward},
        lambda: {"optimizer": Damped},
        lambda: {"optimizer": Saved},
    ],
    ids=["model", "loss", "method", "optimizer", "state dict"],
)
def test_resumed_run_restores_python_counters(tmp_path: Path, fields: Any) -> None:
    whole = weights(tmp_path / "whole", task(**fields()))
    kept = tmp_path / "kept"
    half = weights(tmp_path / "half", task(**fields()), callbacks=[_is_epoch], checkpoint=kept)
    resumed = weights(tmp_path / "resumed", task(**fields()), checkpoint=kept, resume=True)
    for name, expected in whole.items():
        assert not torch.equal(half[name], expected)
        assert torch.equal(resumed[name], expected), name


def test_resuming_a_complete_run_trains_no_step(tmp_path: Path) -> None:
    expected = weights(tmp_path / "run", task())
    found = weights(tmp_path / "again", task(), checkpoint=tmp_path / "run/checkpoints", resume=True)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    with refused(InvalidInput):
        weights(tmp_path / "short", task(epochs=1), checkpoint=tmp_path / "run/checkpoints", resume=True)


def _is_epoch(event: Any) -> bool:
    return isinstance(event, evener.Epoch)


def test_changed_attributes_are_saved_and_model_options_are_not() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Counting())
    attributes = Attributes(owners_of(model, nn.functional.mse_loss, _adam(model)))
    assert attributes.changed() == {}
    model(torch.zeros(2, 4))
    assert attributes.changed() == {"model.1.passes": 1}
    dropout, counting = nn.Dropout(0.1), Counting()
    other = nn.Sequential(dropout, counting)
    Attributes(owners_of(other, nn.functional.mse_loss, _adam(other))).restore({"model.1.passes": 1, "model.gone.x": 2})
    assert (dropout.p, counting.passes) == (0.1, 1)


def test_infinite_numbers_are_saved_and_values_outside_json_are_not() -> None:
    loss = CountingLoss()
    attributes = Attributes(owners_of(None, loss, _adam(loss)))
    loss.best, loss.last, loss.big = math.inf, torch.ones(1), 2**70  # type: ignore[assignment]
    assert attributes.changed() == {"loss.best": math.inf}


def _adam(module: nn.Module) -> Optimizer:
    return torch.optim.Adam([*module.parameters(), nn.Parameter(torch.zeros(1))])


class Remembering(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"passes": 3}


def test_unsavable_state_dict_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with refused(InvalidInput):
        weights(tmp_path, task(model=lambda: Remembering(4, 3)))
    with refused(InvalidInput):
        evener.train(_batches(model=lambda: Remembering(4, 3)), output=tmp_path / "batches", quiet=True)


class Caching(nn.Module):
    """Counts the rows that it keeps in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cached_rows = nn.Linear(4, 3), 0
        self.cache = torch.zeros(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.cached_rows:
            out = out + self.cache.mean(0)
        self.cache, self.cached_rows = out.detach(), len(out)
        return out


@pytest.mark.parametrize("is_batches", [False, True])
def test_tensor_missing_from_checkpoints_prevents_resuming(tmp_path: Path, is_batches: bool) -> None:
    kept, make = tmp_path / "kept", _batches if is_batches else task
    events: list[Event] = []

    def hear(event: Any) -> bool:
        if isinstance(event, Event):
            events.append(event)
        return isinstance(event, evener.Epoch)

    evener.train(make(model=Caching), output=tmp_path / "a", quiet=True, checkpoint=kept, callbacks=[hear])
    assert [event.kind for event in events].count("resuming") == 1
    with refused(InvalidInput):
        evener.train(make(model=Caching), output=tmp_path / "b", quiet=True, checkpoint=kept, resume=True)


class Nested(SGD):
    """Has a tensor deep in its state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sizes": {"first": torch.ones(2)}}


def test_unsavable_optimizer_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with refused(InvalidInput):
        weights(tmp_path, task(optimizer=Nested))
    batches = _batches(optimizer=lambda model: Nested(model.parameters()))
    with refused(InvalidInput):
        evener.train(batches, output=tmp_path / "batches", quiet=True)


@pytest.mark.parametrize("nodes", ["1", pytest.param("1,1", marks=pytest.mark.slow)])
def test_validation_scheduler_is_refused_on_any_number_of_nodes(tmp_path: Path, nodes: str) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with refused(TaskCannot):
        weights(tmp_path, task(scheduler=lambda optimizer, _: plateau(optimizer)), local_nodes=nodes)


def _batches(**fields: Any) -> evener.BatchTask:
    base = {
        "model": lambda: nn.Linear(4, 3),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "train_data": data,
        "batch_size": 10,
        "epochs": 2,
    }
    return evener.BatchTask(**{**base, **fields})
