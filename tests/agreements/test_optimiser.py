"""The server's optimisers do what PyTorch's do, in place or elsewhere, without allocating."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from evener.agreements.layout import ArraySpec, Flat, StateLayout
from evener.agreements.settings import Adam, Grouped, Outer, Sgd
from evener.agreements.threads import BLOCK_BYTES, ThreadPool
from evener.agreements.update import Optimiser

CASES: list[tuple[Outer, Callable[..., torch.optim.Optimizer]]] = [
    (Sgd(learning_rate=0.1), partial(torch.optim.SGD, lr=0.1)),
    (Sgd(learning_rate=0.1, weight_decay=0.02), partial(torch.optim.SGD, lr=0.1, weight_decay=0.02)),
    (Sgd(learning_rate=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (
        Sgd(learning_rate=0.1, momentum=0.9, weight_decay=0.02, is_nesterov=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02, nesterov=True),
    ),
    (Adam(learning_rate=0.02), partial(torch.optim.Adam, lr=0.02)),
    (
        Adam(learning_rate=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    (
        Adam(learning_rate=0.02, weight_decay=0.1, is_decoupled=True),
        partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    ),
]


def layout(size: int, dtype: str = "float64") -> StateLayout:
    return StateLayout(
        entries=(
            ArraySpec(name="w", shape=(size,), dtype=dtype, kind="parameter"),  # type: ignore[arg-type]
            ArraySpec(name="single", shape=(3,), dtype="float32", kind="parameter"),
            ArraySpec(name="mean", shape=(4,), dtype="float64", kind="statistic"),
            ArraySpec(name="tracked", shape=(2,), dtype="int64", kind="counter"),
        )
    )


def start(of: StateLayout) -> Flat:
    flat, draw = Flat(of), np.random.default_rng(0)
    for array in flat.floats:
        array[:] = draw.standard_normal(array.size)
    return flat


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(("outer", "theirs"), CASES)
def test_parameter_without_gradient_stays_unchanged_as_in_pytorch(
    outer: Outer, theirs: Callable[..., torch.optim.Optimizer], is_in_place: bool
) -> None:
    weights = start(layout(50))
    expected = {name: torch.from_numpy(weights.views()[name].copy()) for name in ("w", "single")}
    ours, draw = Optimiser(outer, weights.layout, ThreadPool(1)), np.random.default_rng(1)
    reference = theirs(expected.values())
    for version in range(30):
        change = Flat(weights.layout)
        missing = {0: {0}, 1: {1}, 2: {0, 1}}.get(version % 5, set())
        for index, (name, parameter) in enumerate(expected.items()):
            change.views()[name][:] = gradient = draw.standard_normal(len(parameter))
            parameter.grad = None if index in missing else torch.from_numpy(gradient).to(parameter.dtype)
        reference.step()
        into = weights if is_in_place else Flat(weights.layout)
        ours.step(version, weights, change, into, missing)
        weights = into
    for name, parameter in expected.items():
        np.testing.assert_allclose(weights.views()[name], parameter, rtol=1e-5 if name == "single" else 1e-12)


GROUPED: list[tuple[tuple[Any, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    ((Sgd(learning_rate=0.1), Sgd(learning_rate=0.3, momentum=0.9)), torch.optim.SGD, {"momentum": 0.9}),
    (
        (Adam(learning_rate=0.1), Adam(learning_rate=0.3, weight_decay=0.2, is_decoupled=True)),
        torch.optim.AdamW,
        {"weight_decay": 0.2},
    ),
]


@pytest.mark.parametrize(("rules", "theirs", "settings"), GROUPED)
def test_parameter_groups_equal_pytorch(
    rules: tuple[Any, Any], theirs: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    weights = start(layout(50))
    expected = {name: torch.from_numpy(weights.views()[name].copy()) for name in ("w", "single")}
    zero = {"weight_decay": 0.0}
    pairs = [
        {"params": [expected["single"]], "lr": 0.1, **zero},
        {"params": [expected["w"]], "lr": 0.3, **zero, **settings},
    ]
    reference, draw = theirs(pairs), np.random.default_rng(1)
    ours = Optimiser(Grouped(rules=rules, group_of=(1, 0)), weights.layout, ThreadPool(1))
    for version in range(20):
        change = Flat(weights.layout)
        for name, parameter in expected.items():
            change.views()[name][:] = gradient = draw.standard_normal(len(parameter))
            parameter.grad = torch.from_numpy(gradient).to(parameter.dtype)
        reference.step()
        ours.step(version, weights, change, weights)
    for name, parameter in expected.items():
        np.testing.assert_allclose(weights.views()[name], parameter, rtol=1e-5 if name == "single" else 1e-12)


@pytest.mark.parametrize("bound", [0.5, 1e9])
def test_gradient_clipping_equals_pytorch(bound: float) -> None:
    weights = start(layout(50))
    expected = {name: torch.from_numpy(weights.views()[name].copy()) for name in ("w", "single")}
    outer = Sgd(learning_rate=0.1, momentum=0.9)
    ours, draw = Optimiser(outer, weights.layout, ThreadPool(1), bound), np.random.default_rng(1)
    reference = torch.optim.SGD(expected.values(), lr=0.1, momentum=0.9)
    for version in range(10):
        change = Flat(weights.layout)
        for name, parameter in expected.items():
            change.views()[name][:] = gradient = draw.standard_normal(len(parameter))
            parameter.grad = torch.from_numpy(gradient).to(parameter.dtype)
        torch.nn.utils.clip_grad_norm_(expected.values(), bound)
        reference.step()
        ours.step(version, weights, change, weights)
    for name, parameter in expected.items():
        np.testing.assert_allclose(weights.views()[name], parameter, rtol=1e-5)


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(("outer", "theirs"), CASES)
def test_hundred_steps_equal_pytorch(
    outer: Outer, theirs: Callable[..., torch.optim.Optimizer], is_in_place: bool
) -> None:
    weights = start(layout(1000))
    expected = torch.from_numpy(weights.views()["w"].copy())
    reference, ours = theirs([expected]), Optimiser(outer, weights.layout, ThreadPool(1))
    draw, change = np.random.default_rng(1), Flat(weights.layout)
    for version in range(100):
        change.parameters[0][:] = gradient = draw.standard_normal(1000)
        expected.grad = torch.from_numpy(gradient)
        reference.step()
        into = weights if is_in_place else Flat(weights.layout)
        ours.step(version, weights, change, into)
        weights = into
        np.testing.assert_array_equal(change.parameters[0], gradient)
    np.testing.assert_allclose(weights.views()["w"], expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("outer", "theirs"), CASES)
def test_blocks_and_threads_change_no_bit(outer: Outer, theirs: object) -> None:
    size = 5 * BLOCK_BYTES // 8 + 17
    results = []
    for threads in (1, 2):
        weights = start(layout(size))
        change = start(weights.layout)
        with ThreadPool(threads) as cores:
            optimiser = Optimiser(outer, weights.layout, cores)
            for version in range(3):
                optimiser.step(version, weights, change, weights)
        results.append(weights)
    small = start(layout(size))
    tail = Flat(layout(17))
    tail.views()["w"][:] = small.views()["w"][-17:]
    change = start(small.layout)
    part = Flat(tail.layout)
    part.views()["w"][:] = change.views()["w"][-17:]
    optimiser = Optimiser(outer, tail.layout, ThreadPool(1))
    for version in range(3):
        optimiser.step(version, tail, part, tail)
    np.testing.assert_array_equal(results[0].memory, results[1].memory)
    np.testing.assert_array_equal(results[0].views()["w"][-17:], tail.views()["w"])


@pytest.mark.parametrize(("outer", "theirs"), CASES)
def test_nothing_is_allocated_after_the_first_step(outer: Outer, theirs: object) -> None:
    weights = start(layout(100_000, "float32"))
    change, optimiser = start(weights.layout), Optimiser(outer, weights.layout, ThreadPool(1))
    optimiser.step(0, weights, change, weights)
    tracemalloc.start()
    try:
        optimiser.step(1, weights, change, weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000, "less than a twentieth of one array"


def test_every_version_has_its_rate_and_the_last_one_stays() -> None:
    weights = Flat(layout(1))
    change = Flat(weights.layout)
    change.parameters[0][:] = 1
    optimiser = Optimiser(Sgd(learning_rate=(1.0, 0.5, 0.25)), weights.layout, ThreadPool(1))
    seen = []
    for version in range(5):
        optimiser.step(version, weights, change, weights)
        seen.append(float(weights.parameters[0][0]))
    assert seen == [-1.0, -1.5, -1.75, -2.0, -2.25]


def test_statistics_follow_the_mean_and_counters_the_sum() -> None:
    weights = start(layout(5))
    before = weights.copy()
    change = Flat(weights.layout)
    change.statistics[0][:] = 0.5
    change.counters[:] = 7, 8
    after = Flat(weights.layout)
    Optimiser(Adam(learning_rate=0.1), weights.layout, ThreadPool(1)).step(0, weights, change, after)
    np.testing.assert_array_equal(after.statistics[0], before.statistics[0] - 0.5)
    np.testing.assert_array_equal(after.counters, [7, 8])
    np.testing.assert_array_equal(weights.memory, before.memory)


def test_optimizer_state_arrays_have_names() -> None:
    named = Optimiser(Adam(learning_rate=0.1), layout(5), ThreadPool(1)).arrays
    assert {name: array.size for name, array in named.items()} == {
        "mean.float64": 5, "square.float64": 5, "mean.float32": 3, "square.float32": 3, "skipped.float64": 4,
    }  # fmt: skip
    assert not Optimiser(Sgd(learning_rate=0.1), layout(5), ThreadPool(1)).arrays
