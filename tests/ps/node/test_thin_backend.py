"""The backend of thin tasks: what the server has to do to do as their optimisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evener import autodiff as ad
from evener.agreements.layout import Flat
from evener.agreements.settings import Adam, Grouped, Sgd
from evener.data.tasks.thin import ThinNormalise
from evener.ps.node.thin_backend import ThinBackend
from evener.records.errors import InvalidInput, InvalidValue
from evener.records.task import ThinTask
from support.refusals import refused


def thin(optimizer: Any, rate: Any = None) -> Any:
    made = ThinTask(
        model=lambda: ad.nn.Linear(2, 2),
        loss=ad.functional.mse_loss,
        train_data=lambda: (np.zeros(0), np.zeros(0)),
        optimizer=optimizer,
        rate=rate,
    )
    return ThinBackend(made, 0, "fp32").server_optimizer(4)


def test_server_optimizer_matches_the_thin_optimizer() -> None:
    assert thin(lambda p: ad.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.1)) == Sgd(
        learning_rate=0.5, momentum=0.9, is_nesterov=True, weight_decay=0.1
    )
    assert thin(lambda p: ad.optim.Adam(p, lr=0.5)) == Adam(learning_rate=0.5)
    assert thin(lambda p: ad.optim.AdamW(p, lr=0.5, weight_decay=0.1)) == Adam(
        learning_rate=0.5, weight_decay=0.1, is_decoupled=True
    )


def test_schedule_becomes_one_positive_rate_per_step() -> None:
    found = thin(lambda p: ad.optim.SGD(p, lr=2.0), rate=lambda step, steps: step / steps)
    assert found.learning_rate[1:] == (0.5, 1.0, 1.5)
    assert 0 < found.learning_rate[0] < 1e-300


def test_unsupported_optimizer_raises_invalid_input() -> None:
    class Own(ad.optim.SGD):
        pass

    with refused(InvalidInput):
        thin(lambda p: Own(p, lr=0.1))
    assert thin(lambda p: ad.optim.SGD([{"params": [one]} for one in p], lr=0.1)) == Sgd(learning_rate=0.1)


def _backwards(parameters: Any) -> Any:
    """A group for each parameter, the last one first."""
    return ad.optim.SGD([{"params": [one], "lr": 0.5 * n} for n, one in enumerate(reversed(list(parameters)), 1)])


def test_parameter_groups_retain_their_settings_in_any_order() -> None:
    assert thin(_backwards) == Grouped(rules=(Sgd(learning_rate=0.5), Sgd(learning_rate=1.0)), group_of=(1, 0))


def test_weights_are_in_model_order_for_any_groups() -> None:
    task = replace(_regression(np.ones((4, 6)), np.ones((4, 1))), optimizer=_backwards)
    backend = ThinBackend(task, 0, "fp64")
    expected = {name: tensor.numpy() for name, tensor in backend.model.state_dict().items()}
    for name, array in backend.initial_weights().views().items():
        np.testing.assert_array_equal(array, expected[name])


NO_PAIRS = {
    "fewer targets": (np.zeros(3), np.zeros(2)),
    "one array": np.zeros((3, 2)),
    "one array of two rows": np.zeros((2, 2)),
    "three arrays": (np.zeros(3), np.zeros(3), np.zeros(3)),
    "numbers": (3, 4),
    "nothing": None,
}


@pytest.mark.parametrize("data", NO_PAIRS.values(), ids=NO_PAIRS)
@pytest.mark.parametrize("what", ["train_data", "validation_data"])
def test_data_without_inputs_and_targets_are_rejected(what: str, data: Any) -> None:
    task = ThinTask(
        model=lambda: ad.nn.Linear(2, 2),
        loss=ad.functional.mse_loss,
        train_data=lambda: (np.zeros(3), np.zeros(3)),
        optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1),
    )
    with refused(InvalidInput):
        wrong: dict[str, Any] = {what: lambda: data}
        _ = ThinBackend(replace(task, **wrong), 0, "fp32").num_validation


def test_randomness_depends_on_the_seeds_alone() -> None:
    task = ThinTask(
        model=lambda: ad.nn.Sequential(ad.nn.Linear(8, 8), ad.nn.Dropout(0.5)),
        loss=ad.functional.mse_loss,
        train_data=lambda: (np.ones((4, 8), np.float32), np.ones((4, 8), np.float32)),
        optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1),
    )
    backend, indices = ThinBackend(task, 0, "fp32"), np.arange(4)
    losses = [backend.backward(indices, 0, seeds) for seeds in [(1, 2), (1, 3), (2, 2), (1, 2)]]
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("kind", ["float32", "float64", "uint8"])
def test_float64_run_computes_in_float64_for_any_data(kind: str) -> None:
    random = np.random.default_rng(0)
    rows = (100 * random.random((40, 6))).astype(kind)
    targets = random.random((40, 1)).astype("float32")
    backend = ThinBackend(_regression(rows, targets), 0, "fp64")
    weight, bias = (backend.initial_weights().views()[f"1.{name}"] for name in ("weight", "bias"))
    error = (rows.astype(np.float64) - 33.25) / 78.5 @ weight.T + bias - targets.astype(np.float64)
    expected = float(np.square(error[:30]).mean())
    backend.prepare(1)
    assert backend.backward(np.arange(30), 0, (0,)) == pytest.approx(expected, rel=1e-14, abs=0)
    assert backend.evaluate(0, 30)[0] == pytest.approx(30 * expected, rel=1e-14, abs=0)


def test_float32_run_computes_in_float32_for_float64_data() -> None:
    random = np.random.default_rng(0)
    rows, targets = random.random((40, 6)), random.random((40, 1))
    found = []
    for kind in ("float32", "float64"):
        backend = ThinBackend(_regression(rows.astype(kind), targets.astype(kind)), 0, "fp32")
        backend.prepare(1)
        gradient = Flat(backend.layout)
        loss = backend.backward(np.arange(40), 0, (0,))
        backend.save_gradients(gradient)
        found.append((loss, backend.evaluate(0, 40), gradient.memory.tobytes()))
    assert found[0] == found[1]


def _regression(rows: Any, targets: Any) -> ThinTask:
    return ThinTask(
        model=lambda: ad.nn.Sequential(ThinNormalise(33.25, 78.5), ad.nn.Linear(6, 1)),
        loss=ad.functional.mse_loss,
        train_data=lambda: (rows, targets),
        validation_data=lambda: (rows, targets),
        optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1),
        has_accuracy=False,
    )


def test_validation_without_samples_is_refused() -> None:
    rows, targets = np.ones((4, 6), np.float32), np.ones((4, 1), np.float32)
    task = replace(_regression(rows, targets), validation_data=lambda: (rows[:0], targets[:0]))
    with refused(InvalidValue):
        assert ThinBackend(task, 0, "fp32").num_validation


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": lambda outputs, targets: None},
        {"loss": lambda outputs, targets: 1.0},
        {"loss": lambda outputs, targets: outputs},
        {"loss": lambda outputs, targets: ad.functional.mse_loss(outputs, targets).detach()},
        {"optimizer": lambda p: None},
        {"model": lambda: None},
        {"model": lambda: ad.nn.Linear(2, 0)},
        {"model": ad.nn.ReLU},
    ],
    ids=["no loss", "a number", "a vector", "detached", "no optimizer", "no model", "an empty layer", "no weights"],
)
def test_invalid_part_of_a_task_is_rejected(wrong: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "model": lambda: ad.nn.Linear(2, 2),
        "loss": ad.functional.mse_loss,
        "train_data": lambda: (np.ones((4, 2)), np.ones((4, 2))),
        "optimizer": lambda p: ad.optim.SGD(p, lr=0.1),
    }
    ThinBackend(ThinTask(**fields), 0, "fp32").backward(np.arange(4), 0, (0, 0))
    with refused(InvalidInput):
        ThinBackend(ThinTask(**{**fields, **wrong}), 0, "fp32").backward(np.arange(4), 0, (0, 0))
