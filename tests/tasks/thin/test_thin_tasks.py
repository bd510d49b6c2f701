"""Every thin task is its PyTorch twin: the same state, the same loss, the same gradients, the same samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evener import autodiff as ad
from evener.data import collect, seed_all, split_batch
from evener.errors import InvalidInput, MissingExtra
from evener.star.thin_engine import layout_of_thin_model
from evener.star.torch_state import layout_of_model, shared_state
from evener.task import Task, ThinTask
from evener.tasks import load_task, load_thin_task
from evener.tasks.load import BUILT_IN_THIN_TASKS, has_thin_task

SAMPLES = {
    "digits": (6, 1, 8, 8),
    "mnist": (6, 1, 28, 28),
    "nfnn": (6, 784),
}


def twins(name: str) -> tuple[Task, ThinTask]:
    options = {"channels": "4", "blocks": "2"} if name == "digits" else {}
    return load_task(name, None, options), load_thin_task(name, None, options)


def samples(name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.default_rng(3)
    targets = random.integers(0, 10, SAMPLES[name][0])
    if name == "mnist":
        return random.integers(0, 256, SAMPLES[name]).astype(np.float64), targets
    return random.standard_normal(SAMPLES[name]), targets


@pytest.mark.parametrize("name", BUILT_IN_THIN_TASKS)
def test_loss_gradients_and_statistics_are_those_of_the_pytorch_task(name: str) -> None:
    task, thin = twins(name)
    seed_all(5)
    model, thin_model = task.model().double(), thin.model().double()
    assert layout_of_thin_model(thin_model) == layout_of_model(model)
    thin_model.load_state_dict({key: tensor.detach().numpy() for key, tensor in model.state_dict().items()})
    inputs, targets = samples(name)

    loss = task.loss(model(torch.from_numpy(inputs)), torch.from_numpy(targets))
    loss.backward()  # type: ignore[no-untyped-call]
    thin_loss = thin.loss(thin_model(ad.from_numpy(inputs)), ad.from_numpy(targets))
    thin_loss.backward()

    assert thin_loss.item() == pytest.approx(loss.item(), rel=1e-10)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, parameter in thin_model.named_parameters():
        expected = gradients[key]
        assert expected is not None
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), expected.numpy(), rtol=1e-9, atol=1e-12)
    for key, tensor in shared_state(model).items():
        np.testing.assert_allclose(thin_model.state_dict()[key].numpy(), tensor.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("part", ["train_data", "validation_data"])
def test_samples_have_the_same_numbers(part: str) -> None:
    task, thin = twins("digits")
    dataset, (inputs, targets) = getattr(task, part)(), getattr(thin, part)()
    everything = np.arange(len(dataset))
    expected = split_batch(collect(dataset, everything, 0, 0))
    np.testing.assert_allclose(inputs, expected[0].numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(targets, expected[1].numpy())


def test_batch_size_and_epochs_are_the_same() -> None:
    for name in BUILT_IN_THIN_TASKS:
        task, thin = twins(name)
        assert (thin.name, thin.batch_size, thin.epochs) == (task.name, task.batch_size, task.epochs)


def test_a_file_has_its_thin_twin_beside_it(tmp_path: Path) -> None:
    (tmp_path / "row.py").write_text("import nothing_that_exists\n")
    (tmp_path / "row_thin.py").write_text(_THIN_FILE)
    assert has_thin_task(str(tmp_path / "row.py"))
    assert load_thin_task(str(tmp_path / "row.py")).name == "line"


def test_a_file_of_its_own_may_be_thin_only(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(_THIN_FILE)
    assert load_thin_task(str(tmp_path / "line.py")).name == "line"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(InvalidInput, match=r"must define thin_task, a ThinTask or a function .*; there is none"):
        load_thin_task(str(tmp_path / "empty.py"))
    with pytest.raises(InvalidInput, match=r"no thin task 'mnits', did you mean 'mnist'\?"):
        load_thin_task("mnits")
    assert not has_thin_task(str(tmp_path / "empty.py"))
    assert not has_thin_task("tiny-imagenet")


def test_a_thin_task_that_imports_pytorch_says_so_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "line.py").write_text("import torch\n" + _THIN_FILE)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtra, match="PyTorch is not installed"):
        load_thin_task(str(tmp_path / "line.py"))


_THIN_FILE = """
import numpy as np
from evener.autodiff import functional as F, nn, optim
from evener.task import ThinTask

thin_task = ThinTask(
    name="line",
    model=lambda: nn.Linear(1, 1),
    loss=F.mse_loss,
    train_data=lambda: (np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
    has_accuracy=False,
)
"""
