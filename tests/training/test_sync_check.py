"""Before a run of `--agreement sync` is submitted, its nodes are held against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, TensorDataset

from evener import autodiff as ad
from evener.commands.engines import torch_backend
from evener.commands.train import perform
from evener.commands.train_by_agreement import check_of, prepare, train_by_agreement
from evener.config.run_config import RunConfig
from evener.ps.node.thin_backend import ThinBackend
from evener.records.errors import NeedsRanks, NotExact
from evener.records.events import RunEvent
from evener.records.plan import Check
from evener.records.record import Event, TrainRecord
from evener.records.schema import read_noun
from evener.records.task import Task, ThinTask
from evener.search.runners import open_runner

SAMPLES, FEATURES, CLASSES = 96, 8, 3
MILD_WEIGHTS = torch.tensor([1.0, 1.1, 0.9])


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) * CLASSES // SAMPLES  # in order, as folders of images are
    return TensorDataset(torch.randn(SAMPLES, FEATURES, generator=draw), labels)


class Drawn(Dataset[Any]):
    """Samples with noise of their own, from every generator and in the usual type."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(FEATURES) + torch.rand(1) + random.random() + float(np.random.rand())
        return noise + torch.empty(FEATURES).bernoulli_(0.5), index % CLASSES


class Parts(nn.Module):
    """A linear layer, and what `also` makes of its result."""

    mean: Tensor
    steps: Tensor

    def __init__(self, also: Callable[[Parts, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)
        self.calls, self.also = 0, also
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.also(self, self.linear(x))


class FrozenNorm(nn.BatchNorm1d):
    """As detectors have it: it stays as it was trained before."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


class OwnNorm(nn.BatchNorm1d):
    pass


def network(*layers: nn.Module, features: int = 12) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, features), *layers, nn.Tanh(), nn.Linear(features, CLASSES))


def counts_calls(model: Parts, x: Tensor) -> Tensor:
    model.calls += 1
    return x / model.calls


def counts_steps(model: Parts, x: Tensor) -> Tensor:
    model.steps += 1
    return x


def moves_mean(model: Parts, x: Tensor) -> Tensor:
    model.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - model.mean


def by_batch(_: Parts, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def between_samples(outputs: Tensor, _: Tensor) -> Tensor:
    return (outputs @ outputs.t()).logsumexp(1).mean()


def randomly_masked(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    mask = (torch.rand(len(outputs), 1) < 0.6).to(losses.dtype).flatten()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def summed_in_single_precision(outputs: Tensor, targets: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float32)
    for one in range(2):
        total += F.cross_entropy(outputs * (one + 1.1), targets)
    return total


def groups(parameters: Any) -> list[dict[str, Any]]:
    """Biases, and weights, which decay."""
    every = list(parameters)
    return [
        {"params": [one for one in every if one.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
        {"params": [one for one in every if one.dim() > 1], "weight_decay": 0.5},
    ]


PLAIN = network(nn.Dropout(0.4))
EQUAL: dict[str, dict[str, Any]] = {
    "dropout": {},
    "AdamW with a schedule": {
        "optimizer": lambda parameters: AdamW(parameters, lr=0.01),
        "scheduler": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps),
    },
    "groups with settings of their own": {
        "optimizer": lambda parameters: AdamW(groups(parameters), lr=0.01),
        "scheduler": lambda optimizer, steps: LambdaLR(optimizer, [lambda step: 1 - step / steps, lambda _: 0.5]),
    },
    "an optimiser of the last layer alone": {
        "optimizer": lambda parameters: SGD(list(parameters)[2:], lr=0.1, weight_decay=0.1)
    },
    "samples that draw numbers": {"train_data": lambda: Drawn()},
    "a bound on the gradient": {"clip_norm": 1.0},
    "a norm of each sample": {"model": network(nn.GroupNorm(3, 12))},
    "a frozen BatchNorm": {"model": network(FrozenNorm(12))},
    "a mean of all samples that nobody uses in the same step": {
        "model": lambda: Parts(lambda model, x: (moves_mean(model, x), x)[1])
    },
    "a parameter that is not used, with momentum and weight decay": {
        "model": Parts,
        "optimizer": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    },
    "a parameter that is not used, with AdamW": {
        "model": Parts,
        "optimizer": lambda parameters: AdamW(parameters, lr=0.01),
    },
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "a coin for the whole batch": {"model": lambda: Parts(lambda _, x: x * (torch.rand(1) < 0.5))},
    "a coin of Python": {"model": lambda: Parts(lambda _, x: x * (random.random() + 0.5))},
    "a number of NumPy in the loss": {"loss": lambda o, t: F.cross_entropy(o * (1 + float(np.random.rand())), t)},
    "noise for a weight": {"model": lambda: Parts(lambda model, x: x + x @ torch.randn(3, 3))},
    "a mean over what a random mask leaves": {"loss": randomly_masked},
    "BatchNorm": {"model": network(nn.BatchNorm1d(12))},
    "BatchNorm without running statistics": {"model": network(nn.BatchNorm1d(12, track_running_stats=False))},
    "a subclass of BatchNorm": {"model": network(OwnNorm(12))},
    "SyncBatchNorm": {"model": network(nn.SyncBatchNorm(12))},
    "normalising in a function": {"model": lambda: Parts(by_batch)},
    "a running mean that is used": {"model": lambda: Parts(moves_mean)},
    "a sum": {"loss": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")},
    "class weights": {"loss": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 5.0, 20.0]))},
    "class weights near 1 that stay in float32": {"loss": lambda o, t: F.cross_entropy(o, t, weight=MILD_WEIGHTS)},
    "between samples": {"loss": between_samples},
    "a root of the mean": {"loss": lambda outputs, targets: F.cross_entropy(outputs, targets).sqrt()},
    "counting calls": {"model": lambda: Parts(counts_calls)},
    "counting steps in a buffer": {"model": lambda: Parts(counts_steps)},
    "a model of batches of a fixed size": {"model": lambda: Parts(lambda _, x: x + torch.zeros(32, CLASSES))},
    "a model of batches of an even size": {"model": lambda: Parts(lambda _, x: x.view(-1, 4, CLASSES).view(-1, 3))},
}


def checked(changes: dict[str, Any], **options: Any) -> tuple[Check | None, list[RunEvent]]:
    words: dict[str, Any] = {"model": PLAIN, "loss": F.cross_entropy, "train_data": data, "batch_size": 32, **changes}
    return check(Task(**words), **options)


def check(task: Task | ThinTask, **options: Any) -> tuple[Check | None, list[RunEvent]]:
    config = RunConfig(**{"task": "t", "agreement": "sync", **options})
    if isinstance(task, ThinTask):
        backend: Any = ThinBackend(task, 0, config.precision)
    else:
        backend = torch_backend(task, config)
    before, shown = backend.initial_weights().memory.copy(), list[RunEvent]()
    try:
        job, _ = prepare(config, backend, task)
        return check_of(config, backend, task, job, shown.append), shown
    finally:
        np.testing.assert_array_equal(before, backend.initial_weights().memory)


@pytest.mark.parametrize("changes", EQUAL.values(), ids=EQUAL.keys())
def test_sync_check_accepts_tasks_equal_to_one_process(changes: dict[str, Any]) -> None:
    found, _ = checked(changes)
    assert found is not None
    assert (found.samples, found.precisions) == ((4, 2), ("fp32", "fp64"))
    assert found.off < 1e-9


@pytest.mark.parametrize(
    "loss", [summed_in_single_precision, lambda outputs, targets: F.cross_entropy(outputs.float(), targets)]
)
def test_sync_check_allows_for_rounding_by_the_task_itself(loss: Any) -> None:
    found, _ = checked({"loss": loss}, precision="fp64")
    assert found is not None


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_sync_check_refuses_tasks_that_differ_from_one_process(changes: dict[str, Any]) -> None:
    with pytest.raises(NotExact):
        checked(changes)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_sync_check_covers_other_precisions(precision: str) -> None:
    found, _ = checked({}, precision=precision)
    assert found is not None
    assert set(found.precisions) == {precision, "fp64"}
    with pytest.raises(NotExact):
        checked(DIFFERENT["a sum"], precision=precision)


@pytest.mark.parametrize(
    "options",
    [{"check": False}, {"local_nodes": "1"}, {"batch_size": 1}, {"agreement": "average"}, {"agreement": "async"}],
    ids=str,
)
def test_sync_check_is_skipped_where_nothing_is_divided_or_promised(options: dict[str, Any]) -> None:
    assert checked(DIFFERENT["BatchNorm"], **options) == (None, [])


def test_sync_check_skips_a_task_that_needs_another_machine() -> None:
    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("this needs a GPU")

    found, shown = checked({"loss": fails})
    assert found is None
    assert [event.kind for event in shown if isinstance(event, Event)] == ["not checked"]
    with pytest.raises(NotExact):  # which can be seen without computing
        checked({"loss": fails, **DIFFERENT["BatchNorm"]})


def thin(*layers: Any, loss: Any = ad.functional.cross_entropy) -> ThinTask:
    images, labels = (tensor.numpy() for tensor in data().tensors)
    return ThinTask(
        model=lambda: ad.nn.Sequential(
            ad.nn.Conv2d(1, 4, 3, padding=1), *layers, ad.nn.Flatten(), ad.nn.Linear(32, CLASSES)
        ),
        loss=loss,
        train_data=lambda: (images.reshape(SAMPLES, 1, 2, 4), labels),
        optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1, momentum=0.9),
        rate=lambda step, steps: 1 - step / steps,
        batch_size=32,
    )


def test_sync_check_covers_thin_tasks() -> None:
    found, _ = check(thin(ad.nn.Dropout(0.4)))
    assert found is not None
    assert found.off < 1e-9
    with pytest.raises(NotExact):
        check(thin(ad.nn.BatchNorm2d(4)))
    with pytest.raises(NeedsRanks):
        check(thin(loss=lambda o, t: ad.functional.cross_entropy(o * (1 + float(np.random.rand())), t)))
    with pytest.raises(NotExact):
        check(thin(loss=lambda outputs, targets: ad.functional.cross_entropy(outputs, targets, "sum")))


TINY = str(Path(__file__).parents[1] / "support_tasks" / "tiny.py")


def test_command_reports_the_check_and_refuses_before_nodes_work(tmp_path: Path) -> None:
    words: dict[str, Any] = {"task": TINY, "agreement": "sync", "local_nodes": "1,0.3"}
    with pytest.raises(NeedsRanks):  # ranks have no compression of contributions
        train_by_agreement(RunConfig(**words, compress="bf16", output=tmp_path / "refused"), as_json=False)
    assert not (tmp_path / "refused" / "model.safetensors").exists()
    train_by_agreement(RunConfig(**words, option={"norm": "False"}, output=tmp_path / "out"), as_json=False)
    record = read_noun(tmp_path / "out" / "record.json", TrainRecord)
    assert record.plan.check is not None
    assert record.plan.check.samples == (4, 2)


@pytest.mark.slow
def test_sync_trains_without_the_check_and_one_node_is_one_process(tmp_path: Path) -> None:
    words: dict[str, Any] = {"task": TINY, "precision": "fp64", "seed": 3}
    agreed: dict[str, Any] = {**words, "agreement": "sync", "check": False}
    perform(RunConfig(**words, output=tmp_path / "alone"))
    train_by_agreement(RunConfig(**agreed, local_nodes="1", output=tmp_path / "one"), as_json=False)
    train_by_agreement(RunConfig(**agreed, local_nodes="1,0.3", output=tmp_path / "two"), as_json=False)
    alone, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "one", "two"))
    assert max(float((alone[name].double() - one[name].double()).abs().max()) for name in alone) < 1e-10
    assert max(float((alone[name].double() - two[name].double()).abs().max()) for name in alone) > 1e-3


def test_search_trial_is_checked_where_nodes_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_master(_: Any) -> Iterator[Any]:
        yield None

    prepared: list[Any] = []
    monkeypatch.setattr("evener.commands.up.open_master", no_master)
    monkeypatch.setattr("evener.search.master_runner.MasterRunner.__init__", lambda *words: prepared.append(words[3]))
    monkeypatch.setattr("evener.search.master_runner.MasterRunner.close", lambda _: None)
    asked = RunConfig(task=TINY, agreement="sync")
    from evener.search.options import TuneConfig

    with open_runner(TuneConfig(task=TINY, agreement="sync", vary=("x=1,2",)), tmp_path, lambda _: None):
        prepared[0](asked, False)
        with pytest.raises(NotExact):
            prepared[0](asked, True)
