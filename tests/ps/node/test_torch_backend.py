"""PyTorch's backend: leases that nobody would choose, and schedules that a server cannot follow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from evener.agreements import settings
from evener.agreements.layout import Flat
from evener.agreements.messages import Lease, SampleRange
from evener.agreements.settings import Adam, Grouped, Sgd, Workload
from evener.commands.engines import build_torch_engine
from evener.data.loader import seed_all
from evener.data.tasks.load import load_task
from evener.ps.node.engine import EngineSetup, LoneSamples, TaskEngine
from evener.ps.node.torch_backend import TorchBackend
from evener.ps.node.torch_state import layout_of_model
from evener.ps.protocol.job import Job
from evener.records.errors import InvalidInput, InvalidValue
from evener.records.task import Task
from evener.training.context import Arithmetic
from support.refusals import refused

TINY = Path(__file__).parents[2] / "support_tasks" / "tiny.py"
ALONE = Lease(number=1, version=0, samples=SampleRange(epoch=0, ranges=((5, 1),)), num_steps=1)


def setup() -> EngineSetup:
    """For a network with BatchNorm over single values a channel."""
    task = load_task(str(TINY), None, {})
    seed_all(0)
    train: Any = task.train_data()
    validation: Any = task.validation_data() if task.validation_data else ()
    job = Job(
        run="one",
        task=TINY.name,
        title="tiny",
        agreement_name="average",
        agreement=settings.average(batch=8),
        workload=Workload(num_samples=len(train), num_epochs=1, seed=0),
        layout=layout_of_model(task.model()),
        num_validation=len(validation),
    )
    return EngineSetup(job=job, code=TINY.parent, data=None, device="cpu", speed=1.0, between_steps=lambda: None)


def test_lone_sample_trains_with_batch_norm() -> None:
    engine = build_torch_engine(setup())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    gradient = Flat(engine.layout)
    assert np.isfinite(engine.gradient(ALONE, gradient))
    assert np.any(gradient.parameters[0] != 0)
    assert np.isfinite(engine.local_steps(ALONE, gradient))


@pytest.mark.parametrize("layers", [(nn.Linear(4, 4), nn.BatchNorm1d(4)), (nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2))])
def test_only_a_lone_sample_that_batch_norm_rejects_is_doubled(layers: tuple[nn.Module, ...]) -> None:
    """The other has the statistics and gradients of one process, not those of two equal samples."""
    data = TensorDataset(torch.arange(16.0).reshape(4, 4), torch.zeros(4, 4))
    model = nn.Sequential(*layers, nn.Flatten())
    tried = backend(model=lambda: model, train_data=lambda: data)
    tried.prepare(1)
    tried.set_training(True)
    before = {name: value.clone() for name, value in tried.model.state_dict().items()}
    lone, is_rejected = LoneSamples(tried), isinstance(layers[0], nn.Linear)
    assert lone.enough(np.array([2, 3])).tolist() == [2, 3]
    assert lone.enough(np.array([2])).tolist() == ([2, 2] if is_rejected else [2])
    assert all(torch.equal(value, before[name]) for name, value in tried.model.state_dict().items())


def task(**changes: Any) -> Task:
    words: dict[str, Any] = {
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)),
        "loss": torch.nn.functional.mse_loss,
        "train_data": lambda: TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1)),
    }
    return Task(**{**words, **changes})


def backend(**changes: Any) -> TorchBackend:
    return TorchBackend(task(**changes), 0, Arithmetic("fp32", torch.device("cpu")))


def server(**changes: Any) -> Any:
    return backend(**changes).server_optimizer(3)


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": [one]} for one in model]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model_is_rejected_with_a_remedy(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        InvalidValue, match=f"dtype of weight must be float32, .* got '{name}'; store trained arrays as"
    ):
        layout_of_model(torch.nn.Linear(2, 1, dtype=dtype))


def test_server_optimizer_matches_pytorch() -> None:
    assert server() == Sgd(learning_rate=0.1, momentum=0.9)
    assert server(optimizer=lambda p: torch.optim.AdamW(groups(p), lr=0.5, weight_decay=0.1)) == Adam(
        learning_rate=0.5, weight_decay=0.1, is_decoupled=True
    )


def test_schedule_becomes_one_rate_per_step() -> None:
    found = server(scheduler=lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps))
    assert found.learning_rate == pytest.approx((0.1, 0.1 * 2 / 3, 0.1 / 3))


def test_parameter_groups_retain_their_settings() -> None:
    found = server(optimizer=lambda p: torch.optim.SGD(_two(p), lr=0.1))
    decays, does_not = Sgd(learning_rate=0.1, weight_decay=0.5), Sgd(learning_rate=0.1)
    assert found == Grouped(rules=(does_not, decays), group_of=(1, 0, 1, 0))


def test_optimizer_with_a_step_hook_is_rejected() -> None:
    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(InvalidInput):
        server(optimizer=watched)


def _two(parameters: Any) -> list[dict[str, Any]]:
    """No decay of biases, as transformers have it."""
    every = list(parameters)
    return [
        {"params": [one for one in every if one.dim() == 1]},
        {"params": [one for one in every if one.dim() > 1], "weight_decay": 0.5},
    ]


def test_schedule_of_one_group_is_retained_for_equal_groups() -> None:
    def alone(optimizer: Any, _steps: int) -> LambdaLR:
        return LambdaLR(optimizer, [lambda _: 1.0, *[lambda step: 1 / (step + 1)] * (len(optimizer.param_groups) - 1)])

    found = server(optimizer=lambda p: torch.optim.SGD(groups(p), lr=0.1), scheduler=alone)
    assert found.group_of == (0, 1, 2, 3)
    assert found.rules[0] == Sgd(learning_rate=0.1)
    assert found.rules[1].learning_rate == pytest.approx((0.1, 0.1 / 2, 0.1 / 3))


def test_schedule_that_depends_on_results_is_rejected() -> None:
    with refused(InvalidInput):
        server(scheduler=lambda optimizer, _: ReduceLROnPlateau(optimizer))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


REFUSED: dict[str, dict[str, Any]] = {
    "data without a length": {"train_data": Stream},
    "a model without shapes": {"model": lambda: torch.nn.LazyLinear(1)},
    "sparse gradients": {
        "model": lambda: torch.nn.EmbeddingBag(3, 1, sparse=True),
        "optimizer": lambda parameters: torch.optim.SparseAdam(parameters),
    },
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_task_that_nodes_cannot_synchronize_is_rejected_at_submission(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        backend(**changes)


class Half(torch.nn.Module):
    """Uses one of two layers, and the other one in every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.calls = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.used(x) + (self.spare(x) if self.calls % 3 == 0 else 0)
        return output


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_local_steps_leave_a_parameter_without_gradient_unchanged(kind: Any) -> None:
    made = backend(model=Half, optimizer=lambda parameters: kind(parameters, lr=0.1, weight_decay=0.1))
    plain = copy.deepcopy(made.model)
    optimizer, indices = kind(plain.parameters(), lr=0.1, weight_decay=0.1), np.arange(4)
    made.prepare(8)
    for number in range(8):
        made.backward(indices, 0, (0, number))
        assert made.unused == (() if number % 3 == 2 else (2, 3))
        made.step(number)
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(plain(torch.zeros(4, 2)), torch.zeros(4, 1)))
        optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(made.model.state_dict()[name], tensor)


def test_timing_a_node_leaves_module_counters_unchanged() -> None:
    made = backend(model=Half)
    job = Job(
        run="one",
        task="half",
        title="half",
        agreement_name="average",
        agreement=settings.average(batch=4),
        workload=Workload(num_samples=4, num_epochs=1),
        layout=made.layout,
    )
    engine = TaskEngine(made, EngineSetup(job, None, None, "cpu", 1.0, lambda: None))
    engine.step_seconds(0.0)
    assert made.model.calls == 0
    engine.gradient(Lease(number=0, version=0, samples=SampleRange(epoch=0, ranges=((0, 4),))), Flat(made.layout))
    assert made.model.calls == 1
