"""Replicas that use different weights, or some of them never, train what one process does; hooks see sums."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from evener.comm.group import Group
from evener.parallel.gradient_hooks import GradientHooks, copied
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel, uses_all
from support.thread_ranks import together

INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PARTS = (slice(0, 3), slice(3, 5))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Spare(nn.Module):
    """Has a layer that is never used, one that is used without gradients, and one for other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.never, self.fixed = nn.Linear(4, 4), nn.Linear(4, 4)

    def chosen(self, x: Tensor) -> nn.Module:
        return self.low

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            level = self.fixed(x)
        return self.last(self.chosen(x)(x) + level)  # type: ignore[no-any-return]


class ByValue(Spare):
    def chosen(self, x: Tensor) -> nn.Module:
        return self.low if bool((x[0] == INPUTS[0]).all()) else self.high


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """One process, which computes the parts of the batch one after another."""
    optimizer = optimizer_of(model)
    for _ in range(3):
        for part in PARTS:
            share = len(INPUTS[part]) / len(INPUTS)
            torch.autograd.backward(loss(model(INPUTS[part]), TARGETS[part]) * share)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def replica(group: Group, model: nn.Module) -> dict[str, Tensor]:
    criterion = Criterion(loss=loss, autocast=nullcontext, scale=lambda one: one)
    parallel = ReplicatedModel(model, group, criterion, uses_all=False)
    optimizer, part = optimizer_of(model), PARTS[group.rank]
    for _ in range(3):
        given: Any = (INPUTS[part], TARGETS[part])
        parallel.add_gradients(*given, samples=len(given[0]), total=len(INPUTS), is_last=True)
        assert model.get_parameter("never.weight").grad is None
        assert model.get_parameter("fixed.weight").grad is None
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_replicas_that_use_different_weights_sum_their_gradients() -> None:
    torch.manual_seed(0)
    model = ByValue().double()
    expected = trained(copied(model))
    for found in together(2, lambda group: replica(group, copied(model))):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3)), True),
        (Spare(), False),
        (ByValue(), False),
    ],
)
def test_uses_all_detects_parameters_without_gradients(model: nn.Module, expected: bool) -> None:
    assert uses_all(model.double(), loss, INPUTS, TARGETS) is expected
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_weight_use_is_detected_and_preserves_the_generator() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 if random.random() < 2 else 0)  # type: ignore[no-any-return]

    state = random.getstate()
    assert not uses_all(Drops().double(), loss, INPUTS, TARGETS)
    assert random.getstate() == state


def test_hooks_and_copied_hooks_see_complete_gradients_once_per_step() -> None:
    model: Any = nn.Linear(4, 3).double()
    model.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    seen: list[float] = []
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.norm())))
    twin: Any = copied(model)
    torch.autograd.backward(loss(model(INPUTS), TARGETS))
    hooks = GradientHooks.taken_off(twin)
    assert hooks.names == ("weight", "bias")
    for part in PARTS:
        torch.autograd.backward(loss(twin(INPUTS[part]), TARGETS[part]) * len(INPUTS[part]) / len(INPUTS))
    assert len(seen) == 1
    hooks.run(twin.named_parameters())
    torch.testing.assert_close(twin.weight.grad, model.weight.grad)
    assert seen[0] == pytest.approx(seen[1])


def test_copied_module_has_its_computed_tensors() -> None:
    layer: Any = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)  # type: ignore[no-untyped-call]
    twin: Any = copied(layer)
    torch.testing.assert_close(twin(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    assert twin.weight_orig is not layer.weight_orig
