"""Optimisers: equal to PyTorch's over a hundred steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.autodiff.errors import InvalidOperation, StateMismatch
from support.refusals import refused

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd decay": ("SGD", {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam decay": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
}
methods = pytest.mark.parametrize("method", METHODS)


def pair(dtype: Any) -> tuple[nn.Sequential, torch.nn.Sequential]:
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).to(dtype)
    ours = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    if dtype == torch.float64:
        ours.double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def distance(ours: nn.Module, theirs: torch.nn.Module) -> float:
    state = theirs.state_dict()
    return max(float(np.abs(t.numpy() - state[name].numpy()).max()) for name, t in ours.state_dict().items())


@methods
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["double", "single"])
def test_optimizers_equal_pytorch_over_a_hundred_steps(
    backend: ad.Backend, method: str, dtype: Any, most: float
) -> None:
    torch.manual_seed(0)
    ours, theirs = pair(dtype)
    name, options = METHODS[method]
    own, other = (
        getattr(optim, name)(ours.parameters(), **options),
        getattr(torch.optim, name)(theirs.parameters(), **options),
    )
    for _ in range(100):
        x, y = torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)
        own.zero_grad()
        F.mse_loss(ours(ad.from_numpy(x.numpy())), ad.from_numpy(y.numpy())).backward()
        other.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(theirs(x), y))
        own.step()
        other.step()
    assert distance(ours, theirs) <= most


def grad_of(model: Any, which: str) -> None:
    """Give only layer `which` of both libraries' models a gradient."""
    model.zero_grad()
    loss = (model[int(which)].weight ** 2).sum()
    loss.backward()


@methods
def test_parameters_without_gradients_stay_as_in_pytorch(method: str) -> None:
    ours, theirs = pair(torch.float64)
    name, options = METHODS[method]
    own, other = (
        getattr(optim, name)(ours.parameters(), **options),
        getattr(torch.optim, name)(theirs.parameters(), **options),
    )
    for which in "0", "2", "0", "0", "2":
        for model, optimizer in ((ours, own), (theirs, other)):
            grad_of(model, which)
            optimizer.step()
    assert distance(ours, theirs) <= 1e-12


@methods
def test_parameter_groups_have_their_own_options(method: str) -> None:
    ours, theirs = pair(torch.float64)
    name, options = METHODS[method]

    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": list(model[0].parameters()), "lr": 0.002}, {"params": [model[2].weight]}]

    own, other = getattr(optim, name)(groups(ours), **options), getattr(torch.optim, name)(groups(theirs), **options)
    for step in range(5):
        own.param_groups[1]["lr"] = other.param_groups[1]["lr"] = 0.01 / (step + 1)
        for model, optimizer in ((ours, own), (theirs, other)):
            loss: Any = sum((p**2).sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
    assert distance(ours, theirs) <= 1e-12


def test_parameter_group_zeroes_only_its_own_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ad.ParameterArena(net.parameters())
    first = optim.SGD(net[0].parameters(), lr=0.1)
    net(ad.ones(1, 2)).sum().backward()
    first.zero_grad()
    assert net[0].weight.grad is None
    assert net[1].weight.grad is not None


def descend(net: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[Any]:
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(net(ad.ones(1, 3)), ad.zeros(1, 2)).backward()
        optimizer.step()
    return [p.tolist() for p in net.parameters()]


@methods
def test_saved_optimizer_state_continues(backend: ad.Backend, method: str) -> None:
    name, options = METHODS[method]
    make: Callable[..., optim.Optimizer] = getattr(optim, name)
    net, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = make(net.parameters(), **options)
    descend(net, optimizer, 3)
    copy.load_state_dict(net.state_dict())
    continued = make(copy.parameters(), **options)
    continued.load_state_dict(optimizer.state_dict())
    assert descend(copy, continued, 3) == descend(net, optimizer, 3)


@methods
def test_second_optimizer_starts_fresh(method: str) -> None:
    name, options = METHODS[method]
    make: Callable[..., optim.Optimizer] = getattr(optim, name)
    net = nn.Linear(3, 2)
    start = {key: tensor.numpy().copy() for key, tensor in net.state_dict().items()}
    first = descend(net, make(net.parameters(), **options), 3)
    net.load_state_dict(start)
    assert descend(net, make(net.parameters(), **options), 3) == first


def test_mismatched_optimizer_state_is_refused() -> None:
    adam = optim.Adam(nn.Linear(3, 2).parameters())
    with refused(StateMismatch):
        adam.load_state_dict(optim.SGD(nn.Linear(3, 2).parameters()).state_dict())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: optim.SGD(p, lr=-1.0), "lr must be zero or more, got -1.0"),
        (lambda p: optim.SGD(p, nesterov=True), "nesterov needs a momentum"),
        (lambda p: optim.Adam(p, betas=(0.9, 1.0)), r"betas must be from 0 to below 1, got \(0.9, 1.0\)"),
        (lambda p: optim.AdamW(p, weight_decay=-0.1), "weight_decay must be zero or more"),
        (lambda p: optim.SGD([]), "at least one parameter"),
        (lambda p: optim.SGD([{"params": p, "betas": 1}]), r"may set \['lr', .*got \['betas'\]"),
        (lambda p: optim.SGD([*p, *p]), "in one group only"),
    ],
)
def test_impossible_options_are_refused(make: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(InvalidOperation, match=sentence):
        make(list(nn.Linear(1, 1).parameters()))
