"""The methods: SGD with momentum, Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from math import sqrt
from typing import Any

from evener.autodiff.backends.interface import Array
from evener.autodiff.errors import require
from evener.autodiff.optim.optimizer import Optimizer, Parameters


class SGD(Optimizer):
    """p -= lr v, v = momentum v + g + weight_decay p; with Nesterov's momentum p -= lr (g + momentum v).

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: share of the last step that goes on.
        weight_decay: pull towards 0.
        nesterov: look ahead by the momentum.

    Raises:
        InvalidOperation: an option is negative, or `nesterov` is without momentum.
    """

    states = ("momentum",)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "momentum", "weight_decay"):
            require(group[name] >= 0, "{} must be zero or more, got {}", name, group[name])
        require(group["momentum"] > 0 or not group["nesterov"], "nesterov needs a momentum above 0")
        return group

    def _kept(self) -> tuple[str, ...]:
        return self.states if any(group["momentum"] for group in self.param_groups) else ()

    def _update(self, group: dict[str, Any], _step: int, /, p: Array, g: Array, *states: Array, scratch: Array) -> None:
        be, momentum = self.arena.backend, group["momentum"]
        change, work = scratch
        if group["weight_decay"]:
            g = be.add(g, be.multiply(p, group["weight_decay"], change), change)
        if momentum:
            v = be.add(be.multiply(states[0], momentum, states[0]), g, states[0])
            g = be.add(g, be.multiply(v, momentum, work), work) if group["nesterov"] else v
        be.subtract(p, be.multiply(g, group["lr"], change), p)


class _Moments(Optimizer):
    """m and v follow g and g^2; p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)."""

    states = ("exp_avg", "exp_avg_sq")
    decoupled: bool
    """Whether weight decay shrinks the parameters themselves instead of joining the gradient."""

    def __init__(
        self,
        params: Parameters,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "eps", "weight_decay"):
            require(group[name] >= 0, "{} must be zero or more, got {}", name, group[name])
        require(
            all(0 <= beta < 1 for beta in group["betas"]), "betas must be from 0 to below 1, got {}", group["betas"]
        )
        return group

    def _update(self, group: dict[str, Any], step: int, /, p: Array, g: Array, *states: Array, scratch: Array) -> None:
        be, (beta1, beta2), (m, v), (work, gradient) = self.arena.backend, group["betas"], states, scratch
        if group["weight_decay"] and self.decoupled:
            be.multiply(p, 1 - group["lr"] * group["weight_decay"], p)
        elif group["weight_decay"]:
            g = be.add(g, be.multiply(p, group["weight_decay"], gradient), gradient)
        be.add(m, be.multiply(be.subtract(g, m, work), 1 - beta1, work), m)
        be.multiply(be.multiply(g, g, work), 1 - beta2, work)
        be.add(be.multiply(v, beta2, v), work, v)
        be.multiply(be.sqrt(v, work), 1 / sqrt(1 - beta2**step), work)
        be.divide(m, be.add(work, group["eps"], work), work)
        be.subtract(p, be.multiply(work, group["lr"] / (1 - beta1**step), work), p)


class Adam(_Moments):
    """Steps scaled by the size of recent gradients; weight decay joins the gradient.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: how long mean and square of the gradient are remembered.
        eps: added to the root of the square.
        weight_decay: pull towards 0.

    Raises:
        InvalidOperation: an option is out of range.
    """

    decoupled = False

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class AdamW(_Moments):
    """Adam whose weight decay shrinks the parameters themselves.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: how long mean and square of the gradient are remembered.
        eps: added to the root of the square.
        weight_decay: share of lr by which parameters shrink in a step.

    Raises:
        InvalidOperation: an option is out of range.
    """

    decoupled = True

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
