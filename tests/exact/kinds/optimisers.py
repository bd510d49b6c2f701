"""Optimisers that look at whole tensors, at their order or shape; groups, schedules of their own, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exact.recipe import Kind, images, rows

kind = Kind(__name__)


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),  # whose gradient would be rounding alone
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class _ByTensor(Optimizer):
    """Updates each parameter by a function of it, its gradient and its state."""

    def __init__(self, parameters: Any, rule: Callable[[Tensor, Tensor, dict[str, Any]], Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self._rule(p, p.grad, self.state[p]), alpha=-group["lr"])


def _by_tensor(rule: Callable[[Tensor, Tensor, dict[str, Any]], Any], lr: float = 0.02) -> Callable[[Any], Optimizer]:
    return lambda parameters: _ByTensor(parameters, rule, lr)


def _lars(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad * p.norm() / (grad.norm() + 1e-3)


def _lamb(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * grad
    state["v"] = 0.99 * state.get("v", torch.zeros_like(p)) + 0.01 * grad.square()
    update = state["m"] / (state["v"].sqrt() + 1e-4) + 0.01 * p
    return update * (p.norm() / (update.norm() + 1e-6)).clamp(max=10)


def _muon(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    if p.dim() < 2:
        return grad
    x = grad.flatten(1)
    x = x / (x.norm() + 1e-3)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.t() @ x
    return x.view_as(p)


def _factored(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    if p.dim() < 2:
        return grad / (grad.square().mean().sqrt() + 1e-3)
    square = grad.flatten(1).square() + 1e-8
    mean = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    return grad / (mean.view_as(p) + 1e-6).sqrt()


def _centralised(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad


def _adaptively_clipped(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad * (0.01 * p.norm().clamp(min=1e-3) / grad.norm().clamp(min=1e-6)).clamp(max=1)


def _sign(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + grad
    return state["m"].sign() * 1e-2


def _plain(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad + 0.01 * p


for _name, _rule in {
    "lars": _lars,
    "lamb": _lamb,
    "muon": _muon,
    "factored": _factored,
    "centralised": _centralised,
    "adaptively_clipped": _adaptively_clipped,
    "sign_momentum": _sign,
    "own_plain": _plain,
}.items():
    kind.add(f"{_name}_of_images", _convnet, images(), optimizer=_by_tensor(_rule))
    kind.add(f"{_name}_of_rows", _mlp, rows(), optimizer=_by_tensor(_rule))

for _name, _make in {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "rms_prop_centred": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-4),
    "averaged": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
}.items():
    kind.add(f"torch_{_name}", _convnet, images(), optimizer=_make)


def _decay_by_dims(parameters: Any) -> Optimizer:
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in listed if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def _rate_by_size(parameters: Any) -> Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 / (1 + p.numel()) ** 0.5} for p in parameters])


def _rate_by_place(parameters: Any) -> Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.05 * 0.8**i} for i, p in enumerate(parameters)], momentum=0.9)


def _first_two_only(parameters: Any) -> Optimizer:
    return torch.optim.SGD(list(parameters)[:2], lr=0.05)


def _rate_by_first_side(parameters: Any) -> Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.05 / p.shape[0]} for p in parameters])


kind.add("decay_by_dims", _convnet, images(), optimizer=_decay_by_dims)
kind.add("rate_by_size", _convnet, images(), optimizer=_rate_by_size)
kind.add("rate_by_place", _mlp, rows(), optimizer=_rate_by_place)
kind.add("first_two_only", _mlp, rows(), optimizer=_first_two_only)
kind.add("rate_by_first_side", _mlp, rows(), optimizer=_rate_by_first_side)


class _ClipsInside(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class _ClipsEach(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                nn.utils.clip_grad_norm_([p], 0.02)
        return super().step(closure)


class _ClipsValues(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 1e-3)
        return super().step(closure)


class _Noisy(torch.optim.SGD):
    """Adds noise to the weights (Langevin)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)
        return found


class _ProjectsRows(torch.optim.SGD):
    """Keeps every row of a weight within a ball."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.copy_(torch.renorm(p, 2, 0, 0.8))
        return found


kind.add("clips_inside", _mlp, rows(), optimizer=lambda p: _ClipsInside(p, lr=0.5))
kind.add("clips_each", _mlp, rows(), optimizer=lambda p: _ClipsEach(p, lr=0.5))
kind.add("clips_values", _mlp, rows(), optimizer=lambda p: _ClipsValues(p, lr=0.5))
kind.add("noisy", _mlp, rows(), optimizer=lambda p: _Noisy(p, lr=0.05))
kind.add("projects_rows", _convnet, images(), optimizer=lambda p: _ProjectsRows(p, lr=0.05))
